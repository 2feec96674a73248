"""The help of `atbptt-paper` at 80 columns, and the defaults that it shows."""

import dataclasses
import re

import pytest
from tests.command_line import options

from atbptt_paper.experiments import run
from atbptt_paper.tasks import TASKS
from paper_helpers import call

LONG = [["train", task] for task in TASKS] + [["reproduce"]]
PRESETS = [(task, preset) for task in TASKS for preset in TASKS[task].presets]


@pytest.mark.parametrize("command", [[], ["train"], ["find-lr"], ["findings"], *LONG], ids=" ".join)
def test_help_is_short_and_ends_with_examples_of_a_line_each(command):
    text = call(*command, "--help", columns=80)
    assert 1 <= len(options(text)) <= 12
    assert "<bool>" not in text
    *_, end = text.partition("Examples:")
    lines = [line.strip() for line in end.splitlines() if line.strip()]
    assert lines
    assert all(line.startswith(" ".join(["$ atbptt-paper", *command])) for line in lines)


@pytest.mark.parametrize("command", LONG, ids=" ".join)
def test_help_all_shows_the_common_options_first_and_then_the_others(command):
    short, long = (options(call(*command, word)) for word in ("--help", "--help-all"))
    assert long[: len(short)] == short
    assert len(long) > len(short)
    assert len(set(long)) == len(long)


@pytest.mark.parametrize("task", TASKS)
def test_every_hyperparameter_is_in_help_all(task):
    names = {f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(TASKS[task].config)}
    assert names <= {*options(call("train", task, "--help-all"))}


@pytest.mark.parametrize(("task", "preset"), PRESETS)
def test_the_defaults_shown_are_those_of_the_preset(task, preset):
    before, after = (
        call("train", task, *words)
        for words in (["--preset", preset, "--help-all"], ["--help-all", "--preset", preset])
    )
    assert before == after
    for f in dataclasses.fields(TASKS[task].config):
        value, option = getattr(TASKS[task].presets[preset], f.name), f.name.replace("_", "-")
        row = re.search(rf"^│ +--{option} .*?(?=^│ +--|^╰)", before, re.DOTALL | re.MULTILINE)[0]
        if isinstance(value, bool):
            value = option if value else f"no-{option}"
        shown = re.search(r"\[default: (.*?)\]", row)
        assert (shown and shown[1]) == (None if value is None else str(value)), option


@pytest.mark.parametrize(("task", "preset"), PRESETS)
def test_the_values_of_the_preset_are_used(task, preset, monkeypatch, tmp_path):
    asked = []

    def refuse(config, *_, **__):
        asked.append(config)
        raise ValueError("not today")

    monkeypatch.setattr(run, "train_run", refuse)
    monkeypatch.chdir(tmp_path)
    call("train", task, "--k", "7", "--lr", "0.5", "--preset", preset, code=2)
    assert asked == [TASKS[task].presets[preset].changed(k=7, lr=0.5)]


def test_an_unknown_preset_is_a_sentence_also_in_front_of_help():
    text = call("train", "copy", "--preset", "papr", "--help", code=2)
    assert text.startswith("error: unknown preset 'papr'; did you mean paper?")
