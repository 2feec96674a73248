"""The record of an estimate of K."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..truncate.controller import TruncationState


@dataclass(frozen=True)
class Estimate:
    """One estimate of K.

    Attributes:
        step: data steps trained on before it, over all epochs.
        k: truncation length after it.
        beta: decay rate.
        relative_bias: relative bias at k, or a bound on it.
        outcome: name of the `Outcome`.
        message: the outcome as a sentence.
    """

    step: int
    k: int
    beta: float
    relative_bias: float
    outcome: str
    message: str

    @staticmethod
    def of(state: TruncationState, step: int) -> Estimate | None:
        """Record what a controller decided at a step; None if it decided nothing."""
        decision = state.decision
        if decision is None or state.k is None:
            return None
        return Estimate(
            step=step,
            k=state.k,
            beta=decision.beta,
            relative_bias=decision.relative_bias,
            outcome=decision.outcome.name,
            message=decision.message,
        )


NAMES = [field.name for field in fields(Estimate)]


def pack_history(history: list[Estimate]) -> dict[str, list[Any]]:
    """Return a list per field: there may be many estimates, and names for each would add up."""
    return {name: [getattr(estimate, name) for estimate in history] for name in NAMES}


def unpack_history(saved: Any) -> list[Estimate]:
    """Undo `pack_history`; old checkpoints hold a list of dicts."""
    if not isinstance(saved, dict):
        return [Estimate(**estimate) for estimate in saved]
    return [Estimate(*values) for values in zip(*(saved[name] for name in NAMES), strict=True)]
