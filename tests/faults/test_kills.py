"""A process killed at random moments, over and over, still ends with the same parameters."""

import random
import time

import torch

from .harness import ROUNDS, fit, processes, resumed, small

KILLS = 12  # of one run


def work(folder: str, slow: float) -> None:
    torch.set_num_threads(1)
    trainer = small(folder, checkpoint_seconds=0.0)
    update = trainer._update

    def slower(window):
        update(window)
        time.sleep(slow)  # spreads the work out, so that kills fall everywhere

    trainer._update = slower
    fit(trainer)


def killed(folder, dice) -> int:
    """Kill a run until it has been killed often enough; return how often it was."""
    context = processes()
    path = folder / "checkpoints" / "last.safetensors"
    for kill in range(KILLS):
        process = context.Process(target=work, args=(str(folder), 0.03))
        process.start()
        # Two times out of three when it has written something new; else while it starts.
        if dice.random() < 0.67:
            before = path.stat().st_mtime_ns if path.exists() else 0
            while process.is_alive() and (not path.exists() or path.stat().st_mtime_ns == before):
                time.sleep(0.001)
        process.join(dice.uniform(0.0, 0.1))
        if not process.is_alive():
            assert process.exitcode == 0
            return kill
        process.kill()
        process.join()
    return KILLS


def test_kills(whole, tmp_path, outcomes, must):
    for seed in range(ROUNDS):
        folder = tmp_path / str(seed)
        kills = killed(folder, random.Random(seed))
        assert kills > KILLS // 2
        outcomes[resumed(folder, whole, folder.name)] += kills
    must()
