"""One cell: a method on a task with a learning rate and a seed, for a budget of processor time."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from .engine import Carried
from .methods import METHODS
from .tasks import HELD_BACK, TASKS, Task

LOOKS = 30  # validations per cell; their time does not count


@torch.no_grad()
def validate(task: Task, model: Any) -> float:
    """Return the mean loss of the validation data, the state carried from start to end."""
    x, y = task.valid
    state, total, count = None, 0.0, 0
    model.eval()
    for a in range(0, len(x), 64):
        features, state = model.core(x[a : a + 64], state)
        part = y[a : a + 64]
        n = int((part >= 0).sum()) if not part.is_floating_point() else part.numel()
        if n:
            total += float(task.loss(model.head(features), part)) * n
            count += n
    model.train()
    return total / count


def run(
    name: str, method: str, rate: float, seed: int, share: float = 1.0, until: float = -math.inf
) -> Any:
    """Train until a share of the task's budget is used up; return the validation curve.

    A run ends before that once its validation loss is at most `until`, or no number.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    task = {**TASKS, **HELD_BACK}[name]
    model = task.model(seed)
    steps = len(task.train[0])
    how = METHODS[method](seed)
    optimizer = task.optimizer(model, rate)
    carried = Carried(how.reach)
    budget = task.budget * share
    first, updates, losses = 0, 0, 0
    seconds = 0.0
    curve = [(0.0, 0, validate(task, model))]
    looks = max(1, round(LOOKS * share)) if share > 1.0 else LOOKS
    for look in range(looks):
        due, began = budget * (look + 1) / looks, time.process_time()
        while (passed := time.process_time() - began) < due - seconds:
            if first >= steps:
                first = 0
                carried.begin()
            done = (seconds + passed) / budget
            stop = how.update(task, model, optimizer, carried, first, done)
            updates, losses, first = updates + 1, losses + stop - first, stop
        seconds += passed
        curve.append((round(seconds, 3), updates, validate(task, model)))
        if not math.isfinite(curve[-1][2]) or curve[-1][2] <= until:
            break
    return {
        "task": name,
        "method": method,
        "rate": rate,
        "seed": seed,
        "budget": budget,
        "updates": updates,
        "epochs": losses / steps,
        "about": how.about(),
        "curve": curve,
    }
