"""The numbers of a run: the mean training loss, and the rows of `metrics.jsonl`."""

from __future__ import annotations

import bisect
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._torch.number_formats import wide

if TYPE_CHECKING:
    from .trainer import Trainer


class LossMean:
    """The mean training loss of an epoch; `flush` reads the losses of many windows at once.

    Reading a loss makes the host wait for the GPU, so the trainer does it only now and then.

    Attributes:
        pending: loss, weight and last step of the windows that were not read yet.
        total: weighted sum of the losses read.
        weight: the sum of their weights.
    """

    def __init__(self, total: float = 0.0, weight: float = 0.0) -> None:
        self.pending: list[tuple[Tensor, float, int]] = []
        self.total, self.weight = total, weight

    def flush(self) -> tuple[int, float] | None:
        """Read all pending losses; return step and value of the first that is not finite."""
        if not self.pending:
            return None
        values = wide(torch.stack([loss for loss, _, _ in self.pending])).tolist()
        entries, self.pending = self.pending, []
        for value, (_, weight, step) in zip(values, entries, strict=True):
            if not math.isfinite(value):
                return step, value
            self.total += value * weight
            self.weight += weight
        return None

    @property
    def mean(self) -> float:
        """Mean over all losses flushed so far; NaN if there are none."""
        return self.total / self.weight if self.weight else float("nan")


def epoch_metrics(trainer: Trainer, length: int | None, valid_loss: float | None) -> dict[str, Any]:
    """Return the metrics of the epoch that has just ended; `length` is that of the stream."""
    tbptt = trainer.tbptt
    decision = tbptt.truncation.decision
    return {
        "step": tbptt.trained_steps,
        "event": "epoch",
        "epoch": trainer.epoch,
        "data_passes": None if length is None else tbptt.data_steps / length,
        "train_loss": trainer.train_loss.mean,
        "valid_loss": valid_loss,
        "k": tbptt.k,
        "beta": None if decision is None else decision.beta,
        "relative_bias": None if decision is None else decision.relative_bias,
        "updates": trainer.updates,
        "reach": list(tbptt.reach),
        "lr": float(trainer.optimizer.param_groups[0]["lr"]),
        "seconds": trainer.seconds,
    }


def estimate_metrics(trainer: Trainer) -> dict[str, Any]:
    """Return the metrics of the newest estimate of K, in the epoch under way."""
    tbptt = trainer.tbptt
    latest, decision, evidence = tbptt.history[-1], tbptt.truncation.decision, tbptt.evidence
    assert decision is not None  # an entry in the history comes with a decision
    assert evidence is not None  # and from a measurement
    return {
        "event": "estimate",
        "epoch": trainer.epoch + 1,
        "k": latest.k,
        "beta": latest.beta,
        "relative_bias": latest.relative_bias,
        "outcome": latest.outcome,
        "delta": decision.delta,
        "tau": decision.tau,
        **tbptt.controller.brief(tbptt.truncation, evidence),
    }


def known_rows(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl` as far as a checkpoint knows them."""
    epochs = trainer.history
    if any("step" not in row for row in epochs):  # from a checkpoint of before
        return []
    ends = [row["step"] for row in epochs]
    estimates = [
        {
            "step": e.step,
            "event": "estimate",
            "epoch": bisect.bisect_right(ends, e.step) + 1,
            "k": e.k,
            "beta": e.beta,
            "relative_bias": e.relative_bias,
            "outcome": e.outcome,
        }
        for e in trainer.tbptt.history
    ]
    return [*epochs, *estimates]
