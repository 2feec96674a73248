"""How far a run has come: epochs, updates, seconds, the metrics so far, the best epoch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .loss_mean import LossMean
from .weights import Weights


@dataclass(frozen=True)
class BestEpoch:
    """The epoch with the lowest validation loss.

    Attributes:
        epoch: its number, counted from 1.
        loss: its validation loss.
        weights: the weights at its end.
    """

    epoch: int
    loss: float
    weights: Weights


@dataclass
class RunProgress:
    """The numbers of a run that change while it trains.

    Attributes:
        epoch: epochs trained.
        updates: optimiser steps.
        seconds: training time.
        history: the metrics of every epoch.
        best: the best epoch; None before the first finite validation loss.
        loss: the mean training loss of the epoch under way.
    """

    epoch: int = 0
    updates: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    best: BestEpoch | None = None
    loss: LossMean = field(default_factory=LossMean)

    def state_dict(self) -> dict[str, Any]:
        """Return everything; flush the losses first."""
        best = self.best
        return {
            "meter": self.loss.state_dict(),
            "progress": (self.epoch, self.updates, self.seconds),
            "history": self.history,
            "best": (None,) * 3 if best is None else (best.epoch, best.loss, best.weights.model),
            "best_loss": [] if best is None else best.weights.loss,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.loss.load_state_dict(saved["meter"])
        self.epoch, self.updates, self.seconds = saved["progress"]
        self.history = saved["history"]
        epoch, loss, model = saved["best"]
        # "best_loss" is missing in checkpoints from before losses were saved.
        weights = None if model is None else Weights(model, saved.get("best_loss", []))
        self.best = None if weights is None else BestEpoch(epoch, loss, weights)
