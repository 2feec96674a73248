"""Short runs at several learning rates, and two rules to choose one: lowest loss, the paper's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from adaptive_tbptt import StepScale, evaluate
from adaptive_tbptt.errors import unknown_name

from .run import make_optimizer


@dataclass(frozen=True)
class Trial:
    """A short run at one learning rate.

    Attributes:
        lr: the rate.
        first: training loss before any update.
        last: mean training loss of the last tenth of the updates.
        updates: how many updates there were; fewer than asked where the loss was not finite.
        valid: validation loss at the end; not a number where training had none.
    """

    lr: float
    first: float
    last: float
    updates: int
    valid: float

    @property
    def diverged(self) -> bool:
        """Whether a loss blew up, or training ended well above where it began (10 %; arbitrary)."""
        finite = math.isfinite(self.last) and math.isfinite(self.valid)
        return not finite or self.last > self.first + 0.1 * abs(self.first)


def try_rate(
    config: Any, lr: float, updates: int, after_update: Callable[[], object] = lambda: None
) -> Trial:
    """Train for some updates at a fixed K, then evaluate on the validation split."""
    if updates < 1:
        raise ValueError(f"updates must be at least 1, got {updates}")
    config = config.changed(lr=lr)
    streams, model = config.streams(), config.model()
    optimizer = make_optimizer(config, model)
    scale, clip = StepScale(optimizer, config.rate_rule), config.make_clip()
    tbptt = config.make_tbptt(model)
    losses: list[float] = []
    while len(losses) < updates:
        for window in tbptt.windows(streams["train"]):
            losses.append(float(window.backward()))
            if clip is not None:
                clip(model.parameters(), window.losses)
            scale.step(window)
            optimizer.step()
            optimizer.zero_grad()
            after_update()
            if len(losses) >= updates or not math.isfinite(losses[-1]):
                break
        if not math.isfinite(losses[-1]):
            break
    tenth = max(1, len(losses) // 10)
    last, valid = sum(losses[-tenth:]) / tenth, math.nan
    if math.isfinite(last):
        valid = evaluate(model, config.loss_fn, streams["valid"], chunk=config.eval_chunk)
    return Trial(lr, losses[0], last, len(losses), valid)


# The paper takes the largest rate that does not diverge. It may be the worst of them, so the
# default asks for the validation loss. A rule is what the chosen trial has least of.
RULES: dict[str, Callable[[Trial], tuple[float, ...]]] = {
    "loss": lambda trial: (trial.valid, trial.lr),
    "paper": lambda trial: (-trial.lr,),
}


def choose(trials: Iterable[Trial], rule: str = "loss") -> Trial | None:
    """Return the trial to take among those that did not diverge; None if all did.

    Args:
        trials: one per rate.
        rule: 'loss' takes the lowest validation loss, and of equal ones the smaller rate; 'paper'
            takes the largest rate.
    """
    if rule not in RULES:
        raise unknown_name(rule, RULES, "rule")
    return min((t for t in trials if not t.diverged), key=RULES[rule], default=None)
