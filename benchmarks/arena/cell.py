"""One cell: a method on a task with a learning rate and a seed, for a budget of processor time."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from .engine import Carried
from .methods import METHODS
from .tasks import HELD_BACK, TASKS, Task

LOOKS = 30  # validations per cell; their time does not count
BEATS = 100  # reference windows per cell; nor does theirs


class Clock:
    """Processor time in units of a reference window: 35 steps, forward and backward.

    Two cells side by side slow each other down, and not always equally. The same window is timed
    over and over in every cell of a task, so it tells how fast the machine is at that moment.

    Attributes:
        used: time used so far, in seconds of a machine on which a reference window takes
            `task.window` seconds.
        seconds: the same on this machine.
    """

    def __init__(self, task: Task, model: Any) -> None:
        self.used = self.seconds = 0.0
        self._task, self._model = task, model
        self._beats = deque([self._reference() for _ in range(5)], maxlen=5)

    def _reference(self) -> float:
        x, y = self._task.train
        began = time.process_time()
        outputs, _ = self._model(x[:35])
        torch.autograd.grad(self._task.loss(outputs, y[:35]), list(self._model.parameters()))
        return time.process_time() - began

    def run(self, until: float, work: Callable[[], None]) -> None:
        """Repeat some work until so much time is used, or a beat is due."""
        before = statistics.median(self._beats)
        began = time.process_time()
        allowed = (until - self.used) * before / self._task.window
        while (passed := time.process_time() - began) < allowed:
            work()
        self._beats.append(self._reference())
        # Between the speed before and after, so that a change in between counts half.
        slower = (before + statistics.median(self._beats)) / 2 / self._task.window
        self.seconds += passed
        self.used += passed / slower


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

    def work() -> None:
        nonlocal first, updates, losses
        if first >= steps:
            first = 0
            carried.begin()
        stop = how.update(task, model, optimizer, carried, first, clock.used / budget)
        updates, losses, first = updates + 1, losses + stop - first, stop

    curve = [(0.0, 0, validate(task, model))]
    clock = Clock(task, model)
    looks = max(1, round(LOOKS * share)) if share > 1.0 else LOOKS
    for look in range(looks):
        due = budget * (look + 1) / looks
        while clock.used < due:
            clock.run(min(due, clock.used + task.budget * min(share, 1.0) / BEATS), work)
        curve.append((round(clock.used, 3), updates, validate(task, model)))
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
        "slower": clock.seconds / clock.used,
        "about": how.about(),
        "curve": curve,
    }
