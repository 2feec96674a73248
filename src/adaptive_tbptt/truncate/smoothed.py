"""TODO."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..estimate.lag_profile import Array, LagProfile
from .controller import TruncationState
from .wrappers import _Wrapper


@dataclass(frozen=True)
class Smoothed(_Wrapper):
    """Average how log E phi_k falls over estimates before the wrapped controller sees it.

    Only the shape is averaged, the sum over lags stays the newest one's: as the loss falls all
    gradients shrink, which says nothing of k.

    Attributes:
        controller: the controller to wrap; its gauge must look at the state, as the printed and
            the release's do. Those that look at the parameters remember by themselves
            (`ProbeBudget.remembered`).
        weight: share of the newest estimate; 1 is no smoothing.

    Choosing the weight: parameters move slowly, so estimates of one epoch still speak for the
    next; 0.5 halves the memory with every estimate.
    """

    weight: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 < self.weight <= 1.0:
            raise ValueError(f"weight must be in (0, 1], got {self.weight}")
        if self.controller.sketch:
            raise ValueError(
                "Smoothed averages norms of the state, and this gauge looks at the parameters: it "
                "remembers earlier probes by itself, as many as its probes=ProbeBudget(...) say"
            )

    def change(self, k: int, before: int | None) -> int:
        """Leave k as it is."""
        return k

    def norms(self, control: TruncationState, profile: LagProfile) -> Array:
        """The smoothed means, as one sample."""
        return np.exp(np.asarray(control.memory))[:, None]

    def update(self, control: TruncationState, profile: LagProfile) -> TruncationState:
        """Scale every lag so that the means fall as their running geometric mean does."""
        assert control.inner is not None
        mean = profile.mean
        seen = (mean > 0.0) & ~profile.underflowed
        logs = np.log(mean, out=np.full_like(mean, -np.inf), where=seen)
        if len(control.memory) == len(logs):
            old = np.asarray(control.memory)
            both = np.isfinite(logs) & np.isfinite(old)
            if both.any():
                # A lag that only one of the two resolved counts as the newest estimate says.
                mixed = self.weight * logs[both] + (1.0 - self.weight) * old[both]
                level = np.logaddexp.reduce(logs[both]) - np.logaddexp.reduce(mixed)
                logs[both] = mixed + level
        with np.errstate(under="ignore"):
            factors = np.where(seen, np.exp(logs) / np.where(seen, mean, 1.0), 1.0)
        smooth = replace(profile, state_norms=profile.state_norms * factors[:, None])
        inner = self.controller.update(control.inner, smooth)
        return TruncationState(inner.k, inner.decision, tuple(logs.tolist()), inner)
