"""Progress: plain lines everywhere, a live bar on a terminal where rich is installed."""

import sys
from io import StringIO

import pytest

from adaptive_tbptt.train.progress_display import LINE_SECONDS, ProgressDisplay

from ..small_run import build, streams


class Terminal(StringIO):
    def isatty(self):
        return True


def test_a_run_prints_a_line_per_epoch_where_there_is_no_terminal(capsys):
    trainer = build()
    trainer.show = True
    trainer.fit(*streams(), epochs=2)
    lines = capsys.readouterr().err.strip().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["epoch 1", "epoch 2"]
    for word in ("loss", "valid", "K", "beta", "bias"):
        assert word in lines[-1]


def show(file, **options):
    with ProgressDisplay(100, file=file, **options) as display:
        display.update(50, "epoch 1  loss 0.5")
        display.say("epoch 1 done")
    return file.getvalue()


def test_a_live_bar_on_a_terminal_shows_rate_and_time_left(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    text = show(Terminal())
    assert "epoch 1  loss 0.5" in text
    assert "steps/s" in text
    assert "\x1b[" in text  # redrawn in place
    assert "━" in text


def test_the_bar_goes_away_at_the_end(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    text = show(Terminal())
    assert "━" not in text[text.rindex("\x1b[2K") :]  # nothing is drawn after the last erasure


@pytest.mark.parametrize("file", [StringIO, Terminal])
def test_plain_lines_without_rich(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    lines = show(file()).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("epoch 1  loss 0.5")
    assert "steps/s" in lines[0]
    assert lines[0].endswith("0:00:00 left")
    assert lines[1] == "epoch 1 done"


@pytest.mark.parametrize("file", [StringIO, Terminal])
def test_nothing_is_shown_where_it_is_not_wanted(file):
    assert show(file(), show=False) == ""


def test_a_line_is_due_after_some_seconds(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    display = ProgressDisplay(None, file=StringIO())
    assert not display.wants_update
    now[0] = LINE_SECONDS
    assert display.wants_update
    display.update(10, "epoch 1")
    assert not display.wants_update
