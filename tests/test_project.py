"""The project itself: examples and benchmarks run. The documentation: `test_docs.py`."""

import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import adaptive_tbptt

ROOT = Path(__file__).parent.parent
EXAMPLES = {
    "compiled.py": ["--epochs", "1", "--backend", "eager"],
    "diagnose_copy.py": ["--steps", "20"],
    "distributed.py": ["--epochs", "1"],
    "fabric_loop.py": ["--epochs", "1"],
    "gated_linear_recurrence.py": ["--epochs", "1"],
    "lightning_module.py": ["--epochs", "1"],
    "mixed_precision.py": ["--epochs", "1"],
    "own_loop.py": ["--epochs", "1"],
}
EXTRAS = {"fabric_loop.py": "lightning", "lightning_module.py": "lightning"}


def test_every_example_is_run():
    assert {p.name for p in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, tmp_path):
    extra = EXTRAS.get(name)
    if extra is not None and find_spec(extra) is None:
        pytest.skip(f"{name} needs the extra: pip install 'adaptive-tbptt[{extra}]'")
    command = [sys.executable, str(ROOT / "examples" / name), *EXAMPLES[name]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_memory_benchmark_runs(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "memory.py"), "--lengths", "2000"]
    command += ["--windows", "50", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "out" / "memory.md").read_text()
    assert "| 2000 |" in table
    assert "| 50 |" in table


def test_whole_sequences_are_told_from_broken_ones():
    whole_steps = runpy.run_path(str(ROOT / "benchmarks" / "broken_sequences.py"))["whole_steps"]
    row = [0, 0, 1, 5, 4, 0, 0, 0, 1, 3, 1, 2, 0, 0, 1, 2, 5, 0, 0, 0, 0]
    #      begun | whole          | broken | whole    | a blank too many
    expected = [*[False] * 2, *[True] * 6, *[False] * 2, *[True] * 4, *[False] * 7]
    assert whole_steps(np.array([row]).T, 2, 3)[:, 0].tolist() == expected
    assert not whole_steps(np.array([row]).T, 4, 9).any()


def test_every_public_name_exists_and_has_a_docstring():
    for name in adaptive_tbptt.__all__:
        assert getattr(adaptive_tbptt, name).__doc__, name
