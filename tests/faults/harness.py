"""What the fault injection shares: a small run, seeded damage, and a verdict about what follows.

`FAULTS=20 python -m pytest tests/faults` injects twenty times as many faults.
"""

import multiprocessing
import os
import random
import warnings

import torch

from ..small_run import build, streams, without_times

ROUNDS = int(os.environ.get("FAULTS", "1"))
EPOCHS = 2


def small(folder, **options):
    """The small run without TensorBoard, whose files nothing reads again."""
    return build(folder, tensorboard=False, **options)


def fit(trainer):
    return trainer.fit(*streams(), epochs=EPOCHS, resume=True)


def processes():
    """Return how to start processes that can be killed, with what they need imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        # The optimiser would import the compiler in every process.
        ["torch._dynamo", "tests.faults.test_kills", "tests.faults.test_full_disk"]
    )
    return context


def damaged(data: bytes, dice: random.Random) -> bytes:
    """Change some bytes at random: one bit, one byte, a block, the end, or the length."""
    at, size = dice.randrange(len(data)), dice.choice([1, 8, 100, 4096])
    kind = dice.randrange(7)
    if kind == 0:
        new = bytes([data[at] ^ 1 << dice.randrange(8)])
        found = data[:at] + new + data[at + 1 :]
    elif kind == 1:
        found = data[:at] + dice.randbytes(1) + data[at + 1 :]
    elif kind == 2:  # a block of zeros, as a file system leaves it after a crash
        found = data[:at] + bytes(len(data[at : at + size])) + data[at + size :]
    elif kind == 3:
        found = data[:at]
    elif kind == 4:
        found = data[:at] + data[at + size :]
    elif kind == 5:
        found = data[:at] + dice.randbytes(size) + data[at:]
    else:
        found = data[:at] + data[at : at + size] + data[at:]
    return found if found != data else damaged(data, dice)


def lines_of(folder):
    return (folder / "metrics.jsonl").read_text().splitlines()


def sentence(error: Exception, *names: str) -> str:
    """Judge an error: it should be a sentence that names the file."""
    kind = type(error)
    expected = kind.__module__.startswith("adaptive_tbptt") or kind in (ValueError, OSError)
    if not expected:
        return f"traceback: {kind.__name__}: {error}"
    return "named" if any(name in str(error) for name in names) else f"nameless: {error}"


def resumed(folder, whole, name: str) -> str:
    """Resume a run whose file `name` was damaged; say how that ended."""
    trainer = small(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run may say what it had to mend
        try:
            fit(trainer)
        except Exception as error:
            return sentence(error, name)
    for parameter, value in whole[1].model.state_dict().items():
        if not torch.equal(trainer.model.state_dict()[parameter], value):
            return "silent: other parameters"
    ours, theirs = lines_of(folder), lines_of(whole[0])
    try:
        rows = without_times(ours)
    except ValueError:
        return "silent: a line of metrics is not JSON"
    if len(rows) != len(theirs):
        return f"silent: {len(ours)} lines of metrics, not {len(theirs)}"
    return "equal" if rows == without_times(theirs) else "equal but for logged lines"


def report_of(counts: dict[str, dict[str, int]]) -> list[str]:
    """Return lines for the end of the tests: what was tried, and how it ended."""
    return [
        f"{what}: {sum(found.values())} tried, "
        + ", ".join(f"{number} {outcome}" for outcome, number in sorted(found.items()))
        for what, found in sorted(counts.items())
    ]


def bad(outcomes) -> dict[str, int]:
    """Return the outcomes that must not be."""
    fine = ("equal", "named", "rebuilt", "page")
    return {outcome: n for outcome, n in outcomes.items() if not outcome.startswith(fine)}
