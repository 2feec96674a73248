"""`atbptt`, also as `python -m adaptive_tbptt`. The library itself does without typer and rich."""

import sys


def main() -> None:
    """Run the command line, or say which extra it needs."""
    try:
        from .cli import app
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        sys.exit(f"atbptt needs {missing}: pip install 'adaptive-tbptt[cli]'")
    app(prog_name="atbptt")


if __name__ == "__main__":
    main()
