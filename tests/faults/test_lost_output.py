"""Nobody reads what a run prints: it trains to its end all the same."""

import subprocess
import sys
from io import StringIO

import pytest

from adaptive_tbptt.train.checkpoint import load
from adaptive_tbptt.train.progress_display import ProgressDisplay

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a shell and /dev/full")

TRAIN = """
import sys, warnings
from tests.small_run import build, streams
from adaptive_tbptt import cli_errors
cli_errors.set_up()
def talk(trainer, metrics):
    warnings.warn(f"a warning after epoch {trainer.epoch}")
    cli_errors.OUT.print("a line", "of output")
trainer = build(sys.argv[1], callbacks=[talk])
trainer.show = True
trainer.fit(*streams(), epochs=3)
"""


@pytest.mark.parametrize(
    "redirection",
    ["2>/dev/full", ">/dev/full 2>/dev/full", "2>&-", ">&- 2>&-", "2>&1 | true", "2> >(true)"],
)
def test_a_run_ends_well_without_anybody_to_read_it(tmp_path, redirection):
    command = f'"$0" -c "$1" "$2" {redirection}; exit ${{PIPESTATUS[0]}}'
    given = ["bash", "-c", command, sys.executable, TRAIN, str(tmp_path)]
    done = subprocess.run(given, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 120), done.stderr  # 120: Python could not flush at its very end
    assert load(tmp_path / "checkpoints" / "last.safetensors")["progress"][0] == 3


@pytest.mark.parametrize("error", [OSError(28, "full"), BrokenPipeError(), ValueError("closed")])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_display_that_fails_falls_silent(error, terminal, monkeypatch):
    class Broken(StringIO):
        def isatty(self):
            return terminal

        def write(self, text):
            raise error

    monkeypatch.setenv("TERM", "xterm")
    with ProgressDisplay(100, file=Broken()) as display:
        display.update(50, "epoch 1")
        display.say("epoch 1 done")
        assert not display.wants_update
