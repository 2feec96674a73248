"""`atbptt`, the library's command line: your own models, and run folders of other packages."""

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import adaptive_tbptt as at
from adaptive_tbptt import run_targets
from adaptive_tbptt.cli import app
from adaptive_tbptt.run_targets import RunTarget

from .command_line import call

MINE = """
import torch, adaptive_tbptt as at

def make():
    torch.manual_seed(0)
    x = torch.randn(200, 8, 3)
    return torch.nn.GRU(3, 4), torch.nn.functional.mse_loss, (x, torch.zeros(200, 8, 4))

def wrong():
    return 3

def no_data():
    return *make()[:2], 3

def chunks():
    return *make()[:2], at.ChunkStream([make()[2]])

def windows():
    return *make()[:2], [make()[2]]
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of one's own in the working directory."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_a_model_of_ones_own(mine):
    text = call("diagnose", "mine:make", "--losses", "5", "--lags", "30", "--segments", "8")
    assert "your loop as it is" in text
    assert (mine / "bias.png").exists()
    assert "must return (model, loss_fn, stream)" in call("diagnose", "mine:wrong", code=2)
    assert "expected a stream or a pair" in call("diagnose", "mine:no_data", code=2)
    bound = call(
        "diagnose", "mine:chunks", "--lags", "30", "--segments", "8", "--bound", "--memory", "1"
    )
    assert "1 GB hold a window of " in bound
    assert "paper's bound" in bound
    assert "has no other" in call("diagnose", "mine:other", code=2)
    assert "No module named" in call("diagnose", "nothere:make", code=2)
    assert "at least 6 segments" in call("diagnose", "mine:make", "--segments", "2", code=2)
    assert "neither a run folder" in call("diagnose", "nowhere", code=2)


def test_the_history_that_a_model_of_ones_own_needs(mine):
    text = call("lookback", "mine:make", "--longest", "40")
    assert "against those after the full history" in text
    assert "of history are enough" in text
    assert (mine / "lookback.png").exists()
    assert "against those after windows of 200 steps" in call("lookback", "mine:windows")
    short = call(
        "lookback", "mine:chunks", "--longest", "1", "--tolerance", "1e-6", "--out", "a.png"
    )
    assert "No history up to 1 step is enough" in short
    assert (mine / "a.png").exists()
    assert "tolerance must be in (0, 1)" in call(
        "lookback", "mine:make", "--tolerance", "2", code=2
    )
    assert "expected a stream or a pair" in call("lookback", "mine:no_data", code=2)
    assert "expected a stream or a pair" in call("diagnose", "mine:windows", code=2)


@pytest.mark.filterwarnings("ignore::adaptive_tbptt.TruncationWarning")
def test_the_bias_of_a_model_of_ones_own(mine):
    given = ["--lags", "30", "--segments", "8"]
    text = call("check-bias", "mine:make", "--k", "5", "--delta", "0.9", *given)
    for word in ("paper", "release", "measured", "K=5: relative bias", "delta=0.9 is"):
        assert word in text
    assert "training windows of 5 losses" in text
    more = call("check-bias", "mine:make", "--k", "5", "--delta", "0.9", "--losses", "20", *given)
    assert "training windows of 20 losses" in more
    assert "give --k" in call("check-bias", "mine:make", "--delta", "0.9", *given, code=2)
    assert "give --delta" in call("check-bias", "mine:make", "--k", "5", *given, code=2)
    assert list(mine.glob("*.jsonl")) == []  # there is no run to keep it with


def test_long_lines_are_not_wrapped_where_they_are_piped():
    said = "import warnings; from adaptive_tbptt import cli_errors as c; c.set_up()"
    said += "; warnings.warn('x ' * 60); c.OUT.print('y ' * 60)"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert done.stderr.count("\n") == 1
    assert done.stdout.count("\n") == 1


def open_run(folder):
    """Stand in for a package that knows folders with a file `mine.txt`."""
    if not (folder / "mine.txt").exists():
        return None
    torch.manual_seed(0)
    if (folder / "mine.txt").read_text() == "broken":
        raise ValueError("mine.txt is broken")
    streams = {
        split: at.SequenceStream(torch.randn(200, 4, 3), torch.randn(200, 4, 4))
        for split in ("train", "valid")
    }
    return RunTarget(
        model=torch.nn.GRU(3, 4),
        loss_fn=torch.nn.functional.mse_loss,
        streams=streams,
        delta=0.9,
        k=4,
        losses_per_k=2.0,
        lags=20,
        epoch=7,
        folder=folder,
    )


@pytest.fixture
def registered(monkeypatch):
    """One package that knows no folder, and one that knows some."""
    group = run_targets.RUN_FOLDERS
    entries = [
        EntryPoint("other", "tests.test_cli:knows_none", group),
        EntryPoint("mine", "tests.test_cli:open_run", group),
    ]
    monkeypatch.setattr(run_targets, "entry_points", lambda group: entries)


def knows_none(folder):
    assert isinstance(folder, Path)


@pytest.mark.filterwarnings("ignore::adaptive_tbptt.TruncationWarning")
def test_a_run_folder_is_opened_by_the_package_that_knows_it(registered, tmp_path):
    (tmp_path / "mine.txt").touch()
    figure = str(tmp_path / "decay.png")
    text = call("diagnose", str(tmp_path), "--out", figure, "--segments", "8")
    assert "windows of 8 losses" in text  # twice its K of 4
    assert "against 12 steps of context" in call(
        "diagnose", str(tmp_path), "--out", figure, "--segments", "8", "--lags", "12"
    )
    text = call("lookback", str(tmp_path), "--seconds", "0", "--out", figure)
    assert "of history are enough" in text
    assert "split must be one of" in call("lookback", str(tmp_path), "--split", "test", code=2)
    text = call("check-bias", str(tmp_path), "--segments", "8")
    assert "truncated at K, epoch 7: K=4" in text
    assert "training windows of 8 losses" in text
    assert "delta=0.9 is" in text
    (line,) = (tmp_path / "check_bias.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert {
        "epoch": 7,
        "k": 4,
        "delta": 0.9,
        "split": "train",
        "lags": 20,
    }.items() <= record.items()
    other = call("check-bias", str(tmp_path), "--segments", "8", "--k", "6", "--delta", "0.5")
    assert "K=6" in other
    assert "training windows of 12 losses" in other
    assert "split must be one of train, valid" in call(
        "check-bias", str(tmp_path), "--split", "test", code=2
    )


def test_a_run_folder_that_cannot_be_used_says_why(registered, tmp_path):
    text = call("diagnose", str(tmp_path), code=2)
    assert "no installed package can open the run folder" in text
    assert "asked other, mine" in text
    (tmp_path / "mine.txt").write_text("broken")
    assert "mine.txt is broken" in call("check-bias", str(tmp_path), code=2)


def test_without_any_package_that_registers_run_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(run_targets, "entry_points", lambda group: [])
    for command in ("diagnose", "check-bias"):
        text = call(command, str(tmp_path), code=2)
        assert "none registers run folders" in text
        assert "adaptive-tbptt-paper for runs of atbptt-paper" in text


def test_debug_gives_the_traceback():
    done = CliRunner().invoke(app, ["--debug", "diagnose", "nowhere"])
    assert isinstance(done.exception, ValueError)


def test_help_shows_examples_and_unknown_commands_are_named():
    text = call("--help")
    for word in ("atbptt diagnose mymodule:factory", "lookback", "check-bias", "report"):
        assert word in text
    assert "No such command" in call("train", code=2)
    assert "No such option" in call("diagnose", "mine:make", "--window", "3", code=2)


WITHOUT = """
import sys
from adaptive_tbptt.__main__ import main

missing = sys.argv[1]
for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
    del sys.modules[name]
sys.modules[missing] = None
main()
"""


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_typer_or_rich_it_says_what_to_install(missing):
    command = [sys.executable, "-c", WITHOUT, missing]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == f"atbptt needs {missing}: pip install 'adaptive-tbptt[cli]'"
