"""`python -m adaptive_tbptt` is `atbptt`."""

from .cli import app

if __name__ == "__main__":
    app(prog_name="atbptt")
