"""Always the same truncation length: the plain thing as an instance of the general one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import require_whole
from ..measure.sampling import Evidence
from .controller import Context, Controller, TruncationState


@dataclass(frozen=True)
class FixedTruncation(Controller):
    """Always the same k: ordinary truncated backpropagation. k = T is full backpropagation.

    Attributes:
        k: truncation length; the gradient keeps lags 0..k. 0 is the plain detach loop: a window has
            no context, and `AdaptiveTBPTT(losses=...)` sets how many losses it carries.
    """

    k: int

    def __post_init__(self) -> None:
        require_whole(k=self.k)
        if self.k < 0:
            raise ValueError(f"k must not be negative, got {self.k}: it counts steps back in time")

    @property
    def k_max(self) -> int:
        """The fixed k."""
        return self.k

    def request(self, state: TruncationState, losses: int | None) -> None:
        """Return None: nothing to measure."""
        return None

    def init(self) -> TruncationState:
        """Start with k."""
        return TruncationState(self.k)

    def update(self, state: TruncationState, evidence: Evidence) -> TruncationState:
        """Return the same state."""
        return state

    def context(self, state: TruncationState, losses: int, step: int) -> Context:
        """Return k, the same for every window."""
        return Context(state.known_k)

    def assess(self, state: TruncationState, k: int) -> None:
        """Return None: there is no tolerance to judge by."""
        return None

    def brief(self, state: TruncationState, evidence: Evidence) -> dict[str, Any]:
        """Return nothing: there is no estimate."""
        return {}
