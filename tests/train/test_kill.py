"""A process killed twenty times over still ends with the same parameters."""

import multiprocessing
import os
import random
import signal
import time

import torch

from adaptive_tbptt.train.checkpoint import load

from ..small_run import build, streams

EPOCHS = 6


def work(folder: str, slow: float) -> None:
    torch.set_num_threads(1)
    trainer = build(folder, checkpoint_seconds=0.0)
    update = trainer._update

    def slower(window):
        update(window)
        time.sleep(slow)  # spreads the work out, so that kills fall everywhere

    trainer._update = slower
    trainer.fit(*streams(), epochs=EPOCHS, resume=True)


def test_killed_at_random_moments_twenty_times(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tests.train.test_kill"])
    dice = random.Random(0)
    kills = 0
    for _ in range(100):
        # Slow while it is to be killed, so that it cannot be done before the twentieth time.
        slow = 0.03 if kills < 20 else 0.0
        process = context.Process(target=work, args=(str(tmp_path / "killed"), slow))
        process.start()
        # Until it has written something new, then a random moment more.
        path = tmp_path / "killed" / "checkpoints" / "last.safetensors"
        before = path.stat().st_mtime_ns if path.exists() else 0
        while process.is_alive() and (not path.exists() or path.stat().st_mtime_ns == before):
            time.sleep(0.001)
        process.join(dice.uniform(0.0, 0.1) if kills < 20 else None)
        if not process.is_alive():
            break
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
    assert process.exitcode == 0
    assert kills == 20
    whole = build(tmp_path / "whole", checkpoint_seconds=1e9)
    whole.fit(*streams(), epochs=EPOCHS)
    ours = load(tmp_path / "killed" / "checkpoints" / "last.safetensors")
    for name, value in whole.model.state_dict().items():
        assert torch.equal(ours["model"][name], value), name
    metrics = [
        (tmp_path / n / "metrics.jsonl").read_text().count("\n") for n in ("killed", "whole")
    ]
    assert metrics[0] == metrics[1]
