"""The paper's way to choose a step size: the largest power of ten that does not quickly diverge."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from adaptive_tbptt import StepScale

from .run import make_optimizer


@dataclass(frozen=True)
class Trial:
    """One step size tried: the loss before any update, the mean over the last tenth of them."""

    lr: float
    first: float
    last: float
    updates: int

    @property
    def diverged(self) -> bool:
        """Whether the loss blew up, or ended well above where it began (by 10 %; arbitrary)."""
        return not math.isfinite(self.last) or self.last > self.first + 0.1 * abs(self.first)


def try_rate(config: Any, lr: float, updates: int) -> Trial:
    """Train for some updates at a fixed K."""
    if updates < 1:
        raise ValueError(f"updates must be at least 1, got {updates}")
    config = config.changed(lr=lr)
    stream, model = config.streams()["train"], config.model()
    optimizer = make_optimizer(config, model)
    scale, clip = StepScale(optimizer, config.rate_rule), config.make_clip()
    tbptt = config.make_tbptt(model)
    losses: list[float] = []
    while len(losses) < updates:
        for window in tbptt.windows(stream):
            losses.append(float(window.backward()))
            if clip is not None:
                clip(model.parameters(), window.losses)
            scale.step(window)
            optimizer.step()
            optimizer.zero_grad()
            if len(losses) >= updates or not math.isfinite(losses[-1]):
                break
        if not math.isfinite(losses[-1]):
            break
    tenth = max(1, len(losses) // 10)
    return Trial(lr, losses[0], sum(losses[-tenth:]) / tenth, len(losses))


def find_lr(config: Any, rates: list[float], updates: int) -> tuple[float | None, list[Trial]]:
    """Return the largest rate that did not diverge, and every trial."""
    trials = [try_rate(config, lr, updates) for lr in rates]
    good = [trial.lr for trial in trials if not trial.diverged]
    return (max(good) if good else None), trials
