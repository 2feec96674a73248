"""The project itself: examples run, public names exist. The documentation: `test_docs.py`."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

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
    "longer_memory.py": ["--seconds", "0.5"],
    "mixed_precision.py": ["--epochs", "1"],
    "own_loop.py": ["--epochs", "1"],
    "rainfall_runoff.py": ["--epochs", "1"],
    "sequences.py": ["--epochs", "1"],
    "recurrent_ppo.py": ["--iterations", "4"],
    "state_space.py": ["--epochs", "1"],
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


def test_every_public_name_exists_and_has_a_docstring():
    for name in adaptive_tbptt.__all__:
        assert getattr(adaptive_tbptt, name).__doc__, name
