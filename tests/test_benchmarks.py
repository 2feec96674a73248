"""The benchmarks are scripts; small ones run here. Nothing timed is asserted."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent


def speed(*options):
    command = [sys.executable, str(ROOT / "benchmarks" / "speed.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_contenders_are_timed_side_by_side(tmp_path):
    done = speed("--size", "smoke", "--turns", "2", "--sweeps", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for word in ("per step by hand", "plain loop", "adaptive", "bare products"):
        assert word in done.stdout
    assert (tmp_path / "bench.csv").read_text().count("\n") == 14
    assert "hidden size,8,by hand" in (tmp_path / "sweeps.csv").read_text()
    picture = tmp_path / "sweeps.png"
    assert picture.stat().st_size > 10_000
    drawn, table = picture.read_bytes(), (tmp_path / "bench.md").read_bytes()
    picture.unlink()
    assert speed("--redraw", "--out", str(tmp_path)).returncode == 0  # from what was timed
    assert picture.read_bytes() == drawn
    assert (tmp_path / "bench.md").read_bytes() == table


def test_wrong_use_of_the_timing_is_a_sentence():
    for options, says in (
        (["--size", "cop"], "did you mean copy"),
        (["--only", "prob"], "did you mean probe"),
        (["--turns", "0"], "turns must be at least 1"),
        (["--redraw"], "--redraw needs --out"),
    ):
        done = speed(*options)
        assert done.returncode == 2
        assert says in done.stderr


def test_the_table_of_the_promise_is_that_of_its_cells(tmp_path):
    kept = ROOT / "paper" / "results" / "promise"
    shutil.copytree(kept / "cells", tmp_path / "cells")
    command = [sys.executable, "-m", "benchmarks.promise", "--tables-only", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "table.md").read_text() == (kept / "table.md").read_text()
    assert (tmp_path / "asked_against_true.png").stat().st_size > 10_000


def test_the_memory_benchmark_runs(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "memory.py"), "--lengths", "2000"]
    command += ["--lags", "50", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "out" / "memory.md").read_text()
    assert "| 2000 |" in table
    assert "| 50 |" in table


def test_the_benchmark_of_recomputing_runs(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "recompute.py"), "--steps", "60"]
    command += ["--losses", "20", "--recompute", "10", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    held, again = (tmp_path / "README.md").read_text().splitlines()[4:6]
    assert "| None: held |" in held
    assert "| 10 |" in again


def test_whole_sequences_are_told_from_broken_ones():
    whole_steps = runpy.run_path(str(ROOT / "benchmarks" / "broken_sequences.py"))["whole_steps"]
    row = [0, 0, 1, 5, 4, 0, 0, 0, 1, 3, 1, 2, 0, 0, 1, 2, 5, 0, 0, 0, 0]
    #      begun | whole          | broken | whole    | a blank too many
    expected = [*[False] * 2, *[True] * 6, *[False] * 2, *[True] * 4, *[False] * 7]
    assert whole_steps(np.array([row]).T, 2, 3)[:, 0].tolist() == expected
    assert not whole_steps(np.array([row]).T, 4, 9).any()
