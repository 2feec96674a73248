"""`atbptt-paper train` on several processes: the numbers of one, and a checkpoint if one dies."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from adaptive_tbptt.train import load_checkpoint


def torchrun(folder, *options, count=2):
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}"]
    command += ["--standalone", "-m", "atbptt_paper", "train", "copy", "--preset", "quick"]
    command += ["--delta", "0.5", "--train-steps", "300", "--batch", "6", "--out", str(folder)]
    return subprocess.Popen(
        [*command, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def metrics_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [m for m in map(json.loads, lines) if m["event"] == "epoch"]


def test_the_command_line_trains_on_two_processes(tmp_path):
    process = torchrun(tmp_path / "two", "--epochs", "2")
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    assert printed.count("best validation") == 1
    one = [sys.executable, "-m", "atbptt_paper", "train", "copy", "--preset", "quick"]
    one += ["--delta", "0.5", "--train-steps", "300", "--batch", "6", "--epochs", "2"]
    subprocess.run([*one, "--out", str(tmp_path / "one")], check=True, capture_output=True)
    for a, b in zip(metrics_of(tmp_path / "two"), metrics_of(tmp_path / "one"), strict=True):
        assert a["k"] == b["k"]
        assert a["valid_loss"] == pytest.approx(b["valid_loss"], rel=1e-3)
        assert a["test_ppl"] == pytest.approx(b["test_ppl"], rel=1e-3)


@pytest.mark.skipif(sys.platform == "win32", reason="needs pgrep")
def test_a_process_that_dies_ends_the_run_and_leaves_the_checkpoint(tmp_path):
    process = torchrun(tmp_path / "run", "--epochs", "100000")
    last = tmp_path / "run" / "checkpoints" / "last.safetensors"
    best = last.with_name("best.safetensors")  # comes with the first epoch
    began = time.monotonic()
    while not best.exists() and time.monotonic() - began < 90:
        time.sleep(0.1)
    ranks = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "another process of this run has ended" in printed or "SIGKILL" in printed
    assert load_checkpoint(last)["progress"][0] >= 1
