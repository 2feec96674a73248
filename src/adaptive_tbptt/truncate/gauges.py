"""From a measurement to a bias curve: ways to estimate the relative bias of truncating at K.

`MeasuredGauge` measures the bias of the gradient you train with. The paper's `PaperGauge` and
`ReleaseGauge` use only norms of the state's gradient and *guarantee* nothing: both put a stand-in
where Theorem 1 has the norm of the parameters' gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..estimate.bias import BiasCurve, bias_bound
from ..estimate.decay import DecayFit, Method, fit_decay
from ..estimate.lag_profile import LagProfile
from ..estimate.level_bias import LevelCurve, level_bias
from ..estimate.level_sums import LevelSums, levels_up_to
from ..estimate.truncation import Curve
from ..measure.sampling import Evidence, LagRequest, LevelRequest, Request

Array = NDArray[np.float64]
SINGLE = 4  # times as many windows if each carries a single loss, whose gradient is noisier


class Gauge(ABC):
    """What to measure, and how to turn the measurement into a relative bias."""

    @abstractmethod
    def request(
        self, lags: int, k_range: tuple[int, int], losses: int | None, remembered: int
    ) -> Request:
        """Return what to measure.

        Args:
            lags: how far back to measure.
            k_range: the smallest and the largest k to choose from.
            losses: K2 of the training windows; None if it follows K.
            remembered: groups of earlier measurements that still count.
        """

    @abstractmethod
    def gather(self, earlier: LevelSums | None, evidence: Evidence) -> LevelSums | None:
        """Return what to remember, the newest measurement included; None remembers nothing."""

    @abstractmethod
    def bias(self, evidence: Evidence) -> Curve:
        """Return the relative bias at every k."""

    @abstractmethod
    def brief(self, evidence: Evidence) -> dict[str, Any]:
        """Return what a log should keep of the measurement."""


@dataclass(frozen=True)
class StateGauge(Gauge):
    """Shared by the paper's gauges: a bound from norms of the state's gradient.

    Attributes:
        tau: first lag of the decay fit; an int is a lag, a float a fraction of the lags.
        method: as in `fit_decay`.
    """

    tau: int | float = 0.9
    method: Method = "ols"

    def request(
        self, lags: int, k_range: tuple[int, int], losses: int | None, remembered: int
    ) -> LagRequest:
        """Request the norms of one batch."""
        return LagRequest(lags)

    def gather(self, earlier: LevelSums | None, evidence: Evidence) -> None:
        """Remember nothing: the paper estimates from one batch."""
        return None

    @abstractmethod
    def gradient_norms(self, profile: LagProfile) -> Array | None:
        """Return the stand-in for ||E g_k|| in `bias_bound`; None for sums of phi."""

    def fit(self, profile: LagProfile) -> DecayFit:
        """Fit the decay of the mean norms."""
        return fit_decay(profile.mean, self.tau, self.method, floor=profile.floor)

    def bias(self, evidence: Evidence) -> BiasCurve:
        """Bound the bias at every k up to the lags of the profile."""
        profile = _profile(evidence)
        return bias_bound(profile.mean, self.fit(profile), self.gradient_norms(profile))

    def brief(self, evidence: Evidence) -> dict[str, Any]:
        """Keep the decay curve."""
        return {"decay": _profile(evidence).brief()}


@dataclass(frozen=True)
class PaperGauge(StateGauge):
    """The gauge of the printed paper: sums of E phi_k, the max over k <= K."""

    def gradient_norms(self, profile: LagProfile) -> None:
        """Return None: `bias_bound` sums phi itself."""
        return None


@dataclass(frozen=True)
class ReleaseGauge(StateGauge):
    """The gauge of the authors' release, behind the published K: norms of the mean summed gradient.

    We do not repeat two things of the release: it counts phi_tau twice for K < tau, and its
    least-squares fit ignores tau.
    """

    def gradient_norms(self, profile: LagProfile) -> Array:
        """Return ||E_s sum_{1<=j<=k} dL_s/dh_{s-j}||."""
        return profile.cumulative_norms


class ProbeBudget(NamedTuple):
    """How many windows an estimate backpropagates.

    Attributes:
        segments: windows of every row, per estimate; four times as many if each carries a single
            loss.
        first: the same for an estimate without earlier evidence.
        remembered: windows of earlier estimates that still count, since parameters move slowly.
    """

    segments: int = 8
    first: int = 24
    remembered: int = 24


@dataclass(frozen=True)
class MeasuredGauge(Gauge):
    """The relative bias of the gradient you train with, measured by level, with an interval.

    K is one of the levels 0, 1, 2, 4, ..., so it does not jump from estimate to estimate. It is
    the smallest level whose upper limit is below delta. If noise leaves that open, K stays.

    Attributes:
        budget: how many windows an estimate backpropagates, and how many earlier ones count.
        level: coverage of the intervals.
        size: numbers kept per level and window; larger models are sketched to it.
    """

    budget: ProbeBudget = field(default_factory=ProbeBudget)
    level: float = 0.9
    size: int = 2**14

    def __post_init__(self) -> None:
        if not 0.0 < self.level < 1.0:
            raise ValueError(f"level must be in (0, 1), got {self.level}")
        if self.size < 16:
            raise ValueError(f"size must be at least 16, got {self.size}")
        if min(self.budget.segments, self.budget.first) < 1 or self.budget.remembered < 0:
            raise ValueError(
                "budget must have at least one window per estimate and remember 0 or more, got "
                f"{self.budget}"
            )

    def request(
        self, lags: int, k_range: tuple[int, int], losses: int | None, remembered: int
    ) -> LevelRequest:
        """Request windows of `losses` losses; of single losses if their number follows K."""
        contexts = levels_up_to(max(lags, k_range[1]), *k_range)
        groups = self.budget.segments if remembered else self.budget.first
        segments = groups if losses else SINGLE * groups
        return LevelRequest(contexts, losses or 1, segments, groups, self.size)

    def gather(self, earlier: LevelSums | None, evidence: Evidence) -> LevelSums:
        """Add the newest measurement to the remembered ones."""
        newest = _sums(evidence)
        same = earlier is not None and (earlier.contexts, earlier.losses, earlier.size) == (
            newest.contexts,
            newest.losses,
            newest.size,
        )
        if not same or earlier is None:
            return newest
        return LevelSums.concatenate([earlier.newest(self.budget.remembered), newest])

    def bias(self, evidence: Evidence) -> LevelCurve:
        """Measure the bias of every level."""
        return level_bias(_sums(evidence), self.level)

    def brief(self, evidence: Evidence) -> dict[str, Any]:
        """Keep the bias of every level."""
        return {"levels": self.bias(evidence).brief()}


def _profile(evidence: Evidence) -> LagProfile:
    if not isinstance(evidence, LagProfile):
        raise TypeError(
            "this gauge reads a lag profile, as probe returns it; got gradients by level"
        )
    return evidence


def _sums(evidence: Evidence) -> LevelSums:
    if not isinstance(evidence, LevelSums):
        raise TypeError("this gauge reads gradients by level; got a lag profile")
    return evidence
