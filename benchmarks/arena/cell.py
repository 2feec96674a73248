"""One cell: a method on a task with a learning rate and a seed, for a budget of processor time."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch

from .engine import Carried
from .methods import METHODS
from .tasks import HELD_BACK, TASKS, Task

LOOKS = 30  # validations per cell; their time does not count


def reference(task: Task, model: Any) -> float:
    """Return the processor time of one window of 35 steps, forward and backward.

    The same in every cell of a task, so that it tells how fast the machine was during this one.
    """
    x, y = task.train
    began = time.process_time()
    outputs, _ = model(x[:35])
    torch.autograd.grad(task.loss(outputs, y[:35]), list(model.parameters()))
    return time.process_time() - began


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


def run(name: str, method: str, rate: float, seed: int, share: float = 1.0) -> Any:
    """Train until a share of the task's budget is used up; return the validation curve."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    task = {**TASKS, **HELD_BACK}[name]
    model = task.model(seed)
    steps = len(task.train[0])
    how = METHODS[method](seed)
    optimizer = task.optimizer(model, rate)
    carried = Carried(how.reach)
    budget = task.budget * share
    seconds, used, first, updates, losses = 0.0, 0.0, 0, 0, 0
    curve = [(0.0, 0, validate(task, model))]
    beats = [reference(task, model) for _ in range(3)]
    due = budget / LOOKS
    while used < budget and math.isfinite(curve[-1][2]):
        slower = statistics.median(beats) / task.window
        began = time.process_time()
        while time.process_time() - began < (due - used) * slower:
            if first >= steps:
                first = 0
                carried.begin()
            stop = how.update(task, model, optimizer, carried, first, used / budget)
            updates, losses, first = updates + 1, losses + stop - first, stop
        seconds += time.process_time() - began
        beats.append(reference(task, model))
        used = seconds * task.window / statistics.median(beats)
        due = max(used, due) + budget / LOOKS
        curve.append((round(used, 3), updates, validate(task, model)))
    return {
        "task": name,
        "method": method,
        "rate": rate,
        "seed": seed,
        "budget": budget,
        "updates": updates,
        "epochs": losses / steps,
        "slower": statistics.median(beats) / task.window,
        "curve": curve,
    }
