"""The command line as a person types it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atbptt_paper.cli import app
from paper_helpers import TINY_OPTIONS, ask, call, start, train


def test_a_run_leaves_config_metrics_checkpoints_figures_and_a_summary(tmp_path):
    out = tmp_path / "run"
    text = train("--delta", "0.5", "--out", str(out))
    assert "best validation perplexity" in text
    assert "delta" in text
    for name in ("config.toml", "metrics.jsonl", "summary.md", "run.png", "decay.png"):
        assert (out / name).stat().st_size > 100, name
    assert {p.name for p in (out / "checkpoints").iterdir()} == {
        "last.safetensors",
        "best.safetensors",
    }
    assert "delta = 0.5" in (out / "config.toml").read_text()
    assert "test perplexity" in (out / "summary.md").read_text()
    assert "already holds a run" in train("--delta", "0.5", "--out", str(out), code=2)
    figure = str(tmp_path / "figure.png")
    short = ask("diagnose", str(out), "--lags", "3", "--segments", "8", "--out", figure)
    assert "against 3 steps of context" in short  # shorter than the k_init of the run
    again = train("--delta", "0.5", "--out", str(out), "--resume", "--epochs", "3")
    assert "after epoch" in again
    differs = train("--delta", "0.4", "--out", str(out), "--resume", code=2)
    assert "delta: 0.5 there, 0.4 here" in differs


def test_a_fixed_run_and_its_diagnosis(tmp_path):
    out = tmp_path / "run"
    train("--k", "3", "--out", str(out))
    figure = tmp_path / "figure.png"
    own = ask("diagnose", str(out), "--segments", "8", "--lags", "12", "--out", str(figure))
    assert "windows of 3 losses" in own  # its K, as it was trained
    assert figure.exists()
    more = ask("diagnose", str(out), "--segments", "8", "--lags", "12", "--losses", "7",
               "--delta", "0.3", "--out", str(figure))  # fmt: skip
    assert "windows of 7 losses" in more


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--delta", "1.5"], "delta must be in (0, 1), got 1.5"),
        (["--delta", "0.1", "--k", "10"], "exactly one of --delta"),
        ([], "exactly one of --delta"),
        (["--k", "3", "--m", "0"], "m must be at least 1 symbol, got 0"),
        (["--k", "3", "--preset", "papr"], "did you mean paper?"),
        (["--k", "3", "--data", "nowhere.npz"], "nowhere.npz"),
        (["--k", "3", "--cell", "lsm"], "one of lstm, gru, rnn"),
        (["--k", "3", "--tau", "3"], "tau must be a fraction"),
        (["--k", "3", "--seed", "-1"], "seed must not be negative"),
        (["--k", "3", "--valid-steps", "20"], "too short for a probe"),
        (["--k", "3", "--resume", "--out", "typo"], "no run to resume in typo"),
    ],
)
def test_wrong_use_is_a_sentence_and_exit_code_2(args, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = train(*args, code=2)
    assert says in text
    assert "Traceback" not in text
    assert not (tmp_path / "runs").exists()  # nothing was claimed, so the corrected command works


def test_an_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    text = train("--k", "3", "--out", str(tmp_path / "file" / "run"), code=1)
    assert "cannot write to" in text
    assert "Traceback" not in text


def test_debug_gives_the_traceback():
    done = CliRunner().invoke(app, ["--debug", "train", "copy", "--delta", "1.5"])
    assert isinstance(done.exception, ValueError)


def test_unknown_options_and_names():
    assert "No such option" in call("train", "copy", "--nonsense", code=2)
    assert "did you mean copy-fixed" in call("reproduce", "copyfixed", code=2)
    assert "unknown task" in call("find-lr", "cop", code=2)


def test_tables_only_without_cells_is_a_sentence(tmp_path):
    text = call("reproduce", "copy-fixed", "--tables-only", "--out", str(tmp_path), code=2)
    assert "no finished cells" in text


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_stop_writes_a_checkpoint_and_exits_with_130(tmp_path, number):
    command = [sys.executable, "-m", "atbptt_paper", "train", "copy", *TINY_OPTIONS, "--k", "2",
               "--epochs", "100000", "--out", str(tmp_path / "run")]  # fmt: skip
    process = start(command, stderr=subprocess.PIPE)
    path = tmp_path / "run" / "metrics.jsonl"
    for _ in range(600):
        if path.exists() and path.stat().st_size:
            break
        time.sleep(0.1)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted; train --resume" in errors
    assert (tmp_path / "run" / "checkpoints" / "last.safetensors").exists()


@pytest.mark.filterwarnings("ignore::adaptive_tbptt.TruncationWarning")
def test_check_bias_says_what_was_promised_and_what_is_true(tmp_path):
    out = tmp_path / "run"
    train("--delta", "0.5", "--gauge", "measured", "--out", str(out))
    text = ask("check-bias", str(out), "--segments", "8")
    for word in ("paper", "release", "measured", "training windows", "delta=0.5 is"):
        assert word in text
    record = json.loads((out / "check_bias.jsonl").read_text())
    assert record["delta"] == 0.5
    assert record["verdict"] in ("kept", "broken", "not resolved")
    assert "below the lags" in ask("check-bias", str(out), "--k", "20", code=2)
    far = ask("check-bias", str(out), "--k", "20", "--lags", "30", "--segments", "6")
    assert "losses against 30 lags" in far or "noise hides" in far
    assert "split must be" in ask("check-bias", str(out), "--split", "all", code=2)
    fixed = tmp_path / "fixed"
    train("--k", "3", "--out", str(fixed))
    assert "give --delta" in ask("check-bias", str(fixed), code=2)
    assert "K=3" in ask("check-bias", str(fixed), "--delta", "0.9", "--segments", "6")


def start_table(tmp_path):
    """Start a table that never ends; return its process and the folder of its cell."""
    command = [sys.executable, "-m", "atbptt_paper", "reproduce", "copy-fixed", "--preset",
               "quick", "--epochs", "10000", "--only", "K=5", "--out", str(tmp_path / "table"),
               "--work", str(tmp_path / "work")]  # fmt: skip
    process = start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    run = tmp_path / "work" / "K-5_init-0"
    for _ in range(900):
        if (run / "metrics.jsonl").exists():  # training has begun
            break
        time.sleep(0.1)
    return process, run


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_a_table_leaves_checkpoints_and_no_process(tmp_path, number):
    process, run = start_table(tmp_path)
    time.sleep(1.0)  # into the first epoch, before its own checkpoint is due
    process.send_signal(number)
    out, errors = process.communicate(timeout=90)
    assert process.returncode == 130, errors
    assert "waiting for the cells" in out
    assert (run / "checkpoints" / "last.safetensors").exists()


def test_a_table_that_is_killed_takes_its_cells_along(tmp_path):
    process, _ = start_table(tmp_path)
    listed = ["ps", "-o", "pid=", "--ppid", str(process.pid)]
    children = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()
    process.kill()
    process.communicate()
    for _ in range(300):
        left = [pid for pid in children if Path("/proc", pid).exists()]
        if not left:
            break
        time.sleep(0.1)
    assert children
    assert not left
