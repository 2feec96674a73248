"""TODO."""

from __future__ import annotations

from dataclasses import dataclass

from ..estimate.lag_profile import LagProfile
from .controller import Controller, TruncationState


@dataclass(frozen=True)
class FixedTruncation(Controller):
    """Always the same k: ordinary truncated backpropagation. k = T is full backpropagation.

    Attributes:
        k: truncation length; the gradient keeps lags 0..k.
    """

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {self.k}: it counts steps back in time")

    @property
    def lags(self) -> int:
        """Nothing is measured."""
        return 0

    @property
    def k_max(self) -> int:
        """The one k there is."""
        return self.k

    def init(self) -> TruncationState:
        """Start with k."""
        return TruncationState(self.k)

    def update(self, control: TruncationState, profile: LagProfile) -> TruncationState:
        """Stay."""
        return control

    def assess(self, control: TruncationState, k: int) -> None:
        """No tolerance was asked for."""
        return None
