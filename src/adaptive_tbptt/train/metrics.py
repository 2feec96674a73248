"""The rows of `metrics.jsonl`: one per epoch, one per estimate of K."""

from __future__ import annotations

from typing import Any

from ..loop.adaptive import AdaptiveTBPTT
from .run_progress import RunProgress


def epoch_metrics(
    tbptt: AdaptiveTBPTT,
    progress: RunProgress,
    *,
    length: int | None,
    valid_loss: float | None,
    lr: float,
) -> dict[str, Any]:
    """Return the metrics of the epoch that has just ended.

    Args:
        tbptt: where the windows came from.
        progress: how far the run has come, this epoch included.
        length: steps of the training stream; None where it is not known.
        valid_loss: the validation loss; None without validation.
        lr: the base rate.
    """
    decision = tbptt.truncation.decision
    return {
        "event": "epoch",
        "epoch": progress.epoch,
        "data_passes": None if length is None else tbptt.data_steps / length,
        "train_loss": progress.loss.mean,
        "valid_loss": valid_loss,
        "k": tbptt.k,
        "beta": None if decision is None else decision.beta,
        "relative_bias": None if decision is None else decision.relative_bias,
        "updates": progress.updates,
        "reach": list(tbptt.reach),
        "lr": lr,
        "seconds": progress.seconds,
    }


def estimate_metrics(tbptt: AdaptiveTBPTT, epoch: int) -> dict[str, Any]:
    """Return the metrics of the newest estimate of K.

    Args:
        tbptt: what made the estimate.
        epoch: number of the epoch under way.
    """
    latest, decision, evidence = tbptt.history[-1], tbptt.truncation.decision, tbptt.evidence
    assert decision is not None  # an entry in the history comes with a decision
    assert evidence is not None  # and from a measurement
    return {
        "event": "estimate",
        "epoch": epoch,
        "k": latest.k,
        "beta": latest.beta,
        "relative_bias": latest.relative_bias,
        "outcome": latest.outcome,
        "delta": decision.delta,
        "tau": decision.tau,
        **tbptt.controller.brief(tbptt.truncation, evidence),
    }
