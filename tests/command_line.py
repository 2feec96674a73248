"""The commands as a person types them, inside this process."""

import re

from typer.testing import CliRunner

from adaptive_tbptt.cli import app


def call(*args, code=0, columns=200, app=app, name="atbptt"):
    """Run `atbptt`, or another command; return what it printed."""
    env = {"COLUMNS": str(columns), "NO_COLOR": "1"}
    done = CliRunner().invoke(app, list(args), env=env, prog_name=name)
    assert done.exit_code == code, done.output
    return done.output


def options(text):
    """Return the options that a help text shows."""
    return re.findall(r"^│ +(--[a-z-]+)", text, re.MULTILINE)


def complete(app, name, line):
    """Return what bash completes after the words of a line; the last one may be incomplete."""
    words = f"{name} {line}"
    env = {
        f"_{name.upper().replace('-', '_')}_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    done = CliRunner().invoke(app, [], env=env, prog_name=name)
    assert done.exit_code == 0, done.output
    return done.output.split()
