"""When the trainer steps a learning rate scheduler, and with what."""

from __future__ import annotations

import warnings
from typing import Any, Literal

from torch.optim.lr_scheduler import ReduceLROnPlateau

SchedulerPer = Literal["epoch", "window"]


def check_scheduler(scheduler: Any, per: SchedulerPer) -> None:
    """Refuse a schedule that cannot be followed."""
    if per not in ("epoch", "window"):
        raise ValueError(f"scheduler_per must be 'epoch' or 'window', got {per!r}")
    if per == "window" and isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau needs the validation loss, which comes once per epoch: use "
            "scheduler_per='epoch'"
        )


def step_after_epoch(scheduler: Any, loss: float) -> None:
    """Step a scheduler; `ReduceLROnPlateau` is given the loss of the epoch."""
    seen = (loss,) if isinstance(scheduler, ReduceLROnPlateau) else ()
    with warnings.catch_warnings():
        # torch warns of a scheduler that steps before its optimiser. A run that was resumed at the
        # very end of an epoch looks like that, although the optimiser stepped before the resume.
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        scheduler.step(*seen)
