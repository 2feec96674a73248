"""`python -m atbptt_paper` is `atbptt-paper`; torchrun starts it as `torchrun -m atbptt_paper`."""

from .cli import app


def main() -> None:
    """Run the command line."""
    app(prog_name="atbptt-paper")


if __name__ == "__main__":
    main()
