"""How much an estimate may cost."""

from __future__ import annotations

from typing import NamedTuple


class ProbeBudget(NamedTuple):
    """Windows that an estimate backpropagates.

    Attributes:
        segments: windows of every row, per estimate; four times as many where each carries a
            single loss.
        first: the same for an estimate that has no earlier evidence to rest on.
        remembered: windows of earlier estimates that still count: parameters move slowly.
    """

    segments: int = 8
    first: int = 24
    remembered: int = 24
