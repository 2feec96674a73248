"""The help of `atbptt` at 80 columns, as a person who does not know it sees it."""

import pytest
import typer

from adaptive_tbptt.cli import app

from .command_line import call, options

COMMANDS = [[], ["diagnose"], ["lookback"], ["check-bias"], ["report"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_is_short_and_ends_with_examples_of_a_line_each(command):
    text = call(*command, "--help", columns=80)
    assert 2 <= len(options(text)) <= 12
    *_, end = text.partition("Examples:")
    lines = [line.strip() for line in end.splitlines() if line.strip()]
    assert lines
    assert all(line.startswith(" ".join(["$ atbptt", *command])) for line in lines)


def test_common_options_come_before_the_others():
    text = call("diagnose", "--help")
    assert text.index("─ Options ─") < text.index("--losses") < text.index("─ Measurement ─")
    assert text.index("─ Measurement ─") < text.index("--lags")


def test_flags_do_not_look_as_if_they_took_a_value():
    for command in COMMANDS:
        assert "<bool>" not in call(*command, "--help")


def test_defaults_of_the_run_are_said_to_be_its_own():
    text = " ".join(call("check-bias", "--help").split())
    assert "K to check; without a run, give one. [default: (that of the run's best epoch)]" in text
    assert "Lags to compare with. [default: (the run's own, or 100)]" in text


def test_every_command_of_the_library_is_tried_here():
    assert {*typer.main.get_command(app).commands} == {name for [name] in COMMANDS[1:]}
