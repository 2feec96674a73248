"""TODO."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """One estimate of K.

    Attributes:
        step: data steps trained on when it was made, over all epochs.
        k: truncation length from then on.
        beta: decay rate.
        relative_bias: bound on the relative bias at k.
        outcome: name of the `Outcome`.
        message: the outcome as a sentence.
    """

    step: int
    k: int
    beta: float
    relative_bias: float
    outcome: str
    message: str
