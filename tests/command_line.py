"""The command `atbptt` as a person types it, inside this process."""

from typer.testing import CliRunner

from adaptive_tbptt.cli import app


def call(*args, code=0):
    """Run the command; return what it printed."""
    done = CliRunner().invoke(app, list(args), env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.exit_code == code, done.output
    return done.output
