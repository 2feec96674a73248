"""A disk that fills up: the error names the file, and the run goes on from its last checkpoint."""

import contextlib
import os
import random
import shutil
import signal
import sys

import pytest
import torch

from .harness import ROUNDS, fit, processes, resumed, sentence, small

resource = pytest.importorskip("resource", reason="limits of files; not on Windows")
FIRST = 4  # seed of the sizes


def limited(folder: str, size: int, answer) -> None:
    """Train where no file may grow beyond `size` bytes."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        fit(small(folder, checkpoint_seconds=0.0))
    except Exception as error:
        answer.send(sentence(error, folder))
    else:
        answer.send("equal")


def in_a_process(work, *args) -> tuple[str, int]:
    """Run `work` in a process of its own; return what it answers and how it ended."""
    context = processes()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(*args, theirs))
    process.start()
    theirs.close()
    said = ""
    with contextlib.suppress(EOFError):
        said = ours.recv()
    process.join()
    return said, process.exitcode


def then(said: str, code: int, after: str) -> str:
    """Join how a process ended and how the resumed run did."""
    first = said if code == 0 and said else f"killed by {-code}"
    fine = first in ("named", "equal") and after == "equal"
    return f"{first} first, then equal" if fine else f"wrong: {first}, then {after}"


def test_a_full_disk(whole, tmp_path, outcomes, must):
    dice = random.Random(FIRST)
    largest = (whole[0] / "checkpoints" / "last.safetensors").stat().st_size
    for i in range(5 * ROUNDS):
        folder = tmp_path / str(i) / "run"
        said, code = in_a_process(limited, str(folder), dice.randrange(largest))
        outcomes[then(said, code, resumed(folder, whole, "run"))] += 1
        shutil.rmtree(folder)
    must()


def unheard(folder: str, where: str, answer) -> None:
    """Train with progress that nobody can read."""
    torch.set_num_threads(1)
    if where == "/dev/full":
        written = os.open(where, os.O_WRONLY)
    else:
        read, written = os.pipe()
        os.close(read)
    os.dup2(written, 1)
    os.dup2(written, 2)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1) for n in (1, 2))
    trainer = small(folder)
    trainer.show = True
    try:
        fit(trainer)
    except Exception as error:
        answer.send(f"ended: {type(error).__name__}: {error}")
    else:
        answer.send("equal")
    os._exit(0)  # the interpreter's own last flush cannot succeed


# Passes once training goes on without anyone to read its progress.
@pytest.mark.parametrize("where", ["/dev/full", "a closed pipe"])
def test_progress_that_nobody_can_read(where, whole, tmp_path, outcomes, must):
    folder = tmp_path / "run"
    said, code = in_a_process(unheard, str(folder), where)
    outcomes[then(said, code, resumed(folder, whole, "run"))] += 1
    must()
