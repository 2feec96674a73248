"""What `Trainer.fit` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Stopped = Literal["epochs", "patience", "time"]


@dataclass(frozen=True)
class FitResult:
    """How a run ended.

    Attributes:
        epochs: epochs trained, those before a resume included.
        stopped: the budget that ended the run: 'epochs', 'patience' or 'time'.
        best_epoch: epoch with the lowest validation loss; None without validation.
        best_loss: that loss.
        history: the metrics of every epoch.
    """

    epochs: int
    stopped: Stopped
    best_epoch: int | None
    best_loss: float | None
    history: list[dict[str, Any]]
