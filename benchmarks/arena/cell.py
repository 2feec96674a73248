"""Cells of one heat: methods on one task with one seed, in turn, for equal processor time.

The speed of a machine drifts by half within minutes. So the cells of a heat train in one process, a
slice of time each, again and again: all see the same drift. A slice is as long as a plain detach
loop needs at that moment for its share of a task's updates: a slower machine gives more seconds,
and trains as far.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from .engine import Carried
from .methods import METHODS
from .tasks import HELD_BACK, TASKS, Task

LOOKS = 30  # validations per cell, one after each slice; their time does not count
CLOCK, SAMPLE = "detach 35", 4  # the clock is read by a quarter of its updates


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


class Cell:
    """A method on a task with a learning rate and a seed; it trains until it is told to stop.

    Attributes:
        curve: processor seconds, updates and validation loss at every look.
        ended: whether the loss is no number, or as low as asked for.
    """

    def __init__(self, task: Task, method: str, rate: float, seed: int, until: float) -> None:
        self.task, self.method, self.rate, self.seed, self.until = task, method, rate, seed, until
        self.model = task.model(seed)
        self._how = METHODS[method](seed)
        self._optimizer = task.optimizer(self.model, rate)
        self._carried = Carried(self._how.reach)
        self._seconds, self._first, self._updates, self._losses = 0.0, 0, 0, 0
        self.curve = [(0.0, 0, validate(task, self.model))]
        self.ended = False

    def update(self, done: float) -> None:
        """Train on one window, with the fraction of the budget that is used."""
        if self._first >= len(self.task.train[0]):
            self._first = 0
            self._carried.begin()
        stop = self._how.update(
            self.task, self.model, self._optimizer, self._carried, self._first, done
        )
        self._updates += 1
        self._losses += stop - self._first
        self._first = stop

    def train(self, due: float, since: float, until: float) -> None:
        """Train until so many processor seconds are used in all, then look.

        Args:
            due: the seconds.
            since: fraction of the budget that is used now.
            until: the same then.
        """
        if self.ended:
            return
        began, length = time.process_time(), max(due - self._seconds, 1e-9)
        while (passed := time.process_time() - began) < length:
            self.update(since + (until - since) * passed / length)
        self._seconds += passed
        self.curve.append((round(self._seconds, 3), self._updates, validate(self.task, self.model)))
        loss = self.curve[-1][2]
        self.ended = not math.isfinite(loss) or loss <= self.until

    def result(self) -> dict[str, Any]:
        """Return what a file should keep."""
        return {
            "task": self.task.name,
            "method": self.method,
            "rate": self.rate,
            "seed": self.seed,
            "updates": self._updates,
            "epochs": self._losses / len(self.task.train[0]),
            "about": self._how.about(),
            "curve": self.curve,
        }


def run_heat(
    name: str,
    entries: Sequence[tuple[str, float]],
    seed: int,
    share: float = 1.0,
    until: float = -math.inf,
) -> list[dict[str, Any]]:
    """Train methods in turn until each has used its time.

    Args:
        name: of the task.
        entries: methods and their learning rates.
        seed: of all.
        share: of the task's updates; may be above 1.
        until: a cell ends before that once its validation loss is at most this, or no number.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    task = {**TASKS, **HELD_BACK}[name]
    cells = [Cell(task, method, rate, seed, until) for method, rate in entries]
    clock = Cell(task, CLOCK, task.rates(35)[0], seed, until)
    looks = max(1, round(LOOKS * share)) if share > 1.0 else LOOKS
    updates = task.updates * share / looks
    due, sampled = 0.0, max(1, round(updates / SAMPLE))
    for _ in range(2):  # the first calls are slow
        clock.update(0.0)
    for look in range(looks):
        began = time.process_time()
        for _ in range(sampled):
            clock.update(0.0)
        due += (time.process_time() - began) * updates / sampled
        for cell in cells:
            cell.train(due, look / looks, (look + 1) / looks)
    return [cell.result() for cell in cells]


def run(name: str, method: str, rate: float, seed: int, **limits: float) -> dict[str, Any]:
    """Train one method alone; the limits are those of `run_heat`."""
    return run_heat(name, [(method, rate)], seed, **limits)[0]
