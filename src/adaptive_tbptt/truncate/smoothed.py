"""Smooth the shape of the decay over estimates, for the gauges that look at the state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..estimate.lag_profile import LagProfile
from ..estimate.truncation import TruncationDecision
from ..measure.sampling import Evidence, LagRequest, Request
from .controller import Controller, TruncationState


@dataclass(frozen=True)
class Smoothed(Controller):
    """Average how log E phi_k falls over estimates before the wrapped controller sees it.

    Only the shape is averaged; the sum over lags stays the newest one's. As the loss falls all
    gradients shrink, which says nothing of k.

    Attributes:
        controller: the controller to wrap. Its gauge must look at the state, as the printed and
            the release's do; `MeasuredGauge` remembers by itself (`ProbeBudget.remembered`).
        weight: share of the newest estimate; 1 is no smoothing.

    Choosing the weight: parameters move slowly, so estimates of one epoch still speak for the
    next; 0.5 halves the memory with every estimate.
    """

    controller: Controller
    weight: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 < self.weight <= 1.0:
            raise ValueError(f"weight must be in (0, 1], got {self.weight}")
        wanted = self.controller.request(self.controller.init(), None)
        if not isinstance(wanted, LagRequest | None):
            raise ValueError(
                "Smoothed averages norms of the state's gradient, and this gauge measures that of "
                "the parameters: it remembers earlier windows by itself, as many as its "
                "budget=ProbeBudget(...) says"
            )

    @property
    def k_max(self) -> int:
        """The wrapped controller's."""
        return self.controller.k_max

    def request(self, state: TruncationState, losses: int | None) -> Request | None:
        """Ask for what the wrapped controller wants."""
        return self.controller.request(_inner(state), losses)

    def init(self) -> TruncationState:
        """Start as the wrapped controller does."""
        inner = self.controller.init()
        return TruncationState(inner.k, inner.decision, inner=inner)

    def update(self, state: TruncationState, evidence: Evidence) -> TruncationState:
        """Scale every lag so that the means fall as their running geometric mean does."""
        assert isinstance(evidence, LagProfile)
        mean = evidence.mean
        seen = (mean > 0.0) & ~evidence.underflowed
        logs = np.log(mean, out=np.full_like(mean, -np.inf), where=seen)
        if len(state.memory) == len(logs):
            old = np.asarray(state.memory)
            both = np.isfinite(logs) & np.isfinite(old)
            if both.any():
                # A lag that only one of the two resolved counts as the newest estimate says.
                mixed = self.weight * logs[both] + (1.0 - self.weight) * old[both]
                level = np.logaddexp.reduce(logs[both]) - np.logaddexp.reduce(mixed)
                logs[both] = mixed + level
        with np.errstate(under="ignore"):
            factors = np.where(seen, np.exp(logs) / np.where(seen, mean, 1.0), 1.0)
        smooth = replace(evidence, state_norms=evidence.state_norms * factors[:, None])
        inner = self.controller.update(_inner(state), smooth)
        return TruncationState(inner.k, inner.decision, tuple(logs.tolist()), inner)

    def assess(self, state: TruncationState, k: int) -> TruncationDecision | None:
        """Ask the wrapped controller."""
        return self.controller.assess(_inner(state), k)

    def brief(self, state: TruncationState, evidence: Evidence) -> dict[str, Any]:
        """Keep the smoothed means, as one sample."""
        assert isinstance(evidence, LagProfile)
        smooth = np.exp(np.asarray(state.memory))[:, None]
        return {"decay": replace(evidence, state_norms=smooth).brief()}


def _inner(state: TruncationState) -> TruncationState:
    assert state.inner is not None
    return state.inner
