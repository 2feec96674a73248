"""TODO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..estimate.bias import BiasCurve
from ..estimate.contributions import Contributions
from ..estimate.lag_profile import Array, LagProfile
from ..estimate.measured_curve import MeasuredCurve, gradient_norm, measured_bias
from ..estimate.resampling import Interval, Uncertainty, bootstrap
from ..estimate.truncation import open_range
from .gauges import Gauge
from .probe_budget import SEVERAL, ProbeBudget


@dataclass(frozen=True)
class _ParameterSpace(Gauge):
    """Shared by the gauges that see the parameters' gradient.

    Attributes:
        size: of the sketches; the error of a norm is about 1 / sqrt(size) of it.
        level: coverage of the intervals.
        probes: how many probes an estimate takes.
        tau: half of the window by default: beyond it only what the window does not see is left to
            the fit, and a short stretch of a noisy decay may rise.
    """

    tau: int | float = 0.5
    size: int = 1024
    level: float = 0.9
    probes: ProbeBudget = SEVERAL

    def __post_init__(self) -> None:
        if self.size < 16:  # arbitrary: the error would be a quarter
            raise ValueError(f"size must be at least 16, got {self.size}")
        fresh, budget, remembered = self.probes
        if not 1 <= fresh <= budget or remembered < 0:
            raise ValueError(f"expected 1 <= fresh <= budget and remembered >= 0 in {self.probes}")
        if not 0.0 < self.level < 1.0:
            raise ValueError(f"level must be in (0, 1), got {self.level}")

    @property
    def sketch(self) -> int:
        """Size of the sketches."""
        return self.size

    def norms(self, profile: LagProfile) -> Array:
        """||c_k||."""
        return _contributions(profile).norms


@dataclass(frozen=True)
class ParameterGauge(_ParameterSpace):
    """A true bound up to sampling: sums of E||c_k|| over the lower limit of ||E g_R|| - E(R).

    The state's norm counts directions that never reach the parameters; this one does not, and no
    bound M on dh/dtheta is needed.

    Attributes:
        tau: first lag of the decay fit; half of the window by default.
        size: of the sketches; the error of a norm is about 1 / sqrt(size) of it.
        level: coverage of the intervals.
        probes: how many probes an estimate takes.
    """

    def gradient_norms(self, profile: LagProfile) -> Array:
        """The lower limit of the whole window's; 0 where noise hides it, and then nothing holds."""
        contributions = _contributions(profile)
        norms = np.zeros(contributions.lags)
        _, norms[-1] = gradient_norm(contributions, self.level)
        return norms

    def bias(self, profile: LagProfile) -> BiasCurve:
        """Bound the bias; say where there would be a bound but for the noise."""
        curve = super().bias(profile)
        if np.isfinite(curve.log_relative).any() or not curve.fit.decays:
            return curve
        norm, lowest = gradient_norm(_contributions(profile), self.level)
        return replace(curve, hidden=lowest == 0.0 or norm > curve.absolute[-1])


@dataclass(frozen=True)
class MeasuredGauge(_ParameterSpace):
    """The relative bias itself, with an interval; K is chosen by its upper limit.

    Attributes:
        tau: first lag of the decay fit; half of the window by default.
        size: of the sketches; the error of a norm is about 1 / sqrt(size) of it.
        level: coverage of the intervals.
        probes: how many probes an estimate takes.
        losses: None measures the gradient truncated at K, as Theorem 1 has it. A number measures
            that of a training window with so many losses, as in `AdaptiveTBPTT(losses=...)`:
            later losses of a window see further back, so a smaller K will do.
    """

    losses: int | float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.losses is not None and not self.losses > 0:
            raise ValueError(f"losses must be positive, got {self.losses}")

    def gradient_norms(self, profile: LagProfile) -> None:
        """Nothing is bounded."""
        return None

    def bias(self, profile: LagProfile) -> MeasuredCurve:
        """Measure the bias."""
        return measured_bias(
            _contributions(profile), self.fit(profile), losses=self.losses, level=self.level
        )

    def uncertainty(
        self,
        profile: LagProfile,
        deltas: Sequence[float],
        *,
        k_min: int,
        k_max: int,
        level: float = 0.95,
        seed: int = 0,
    ) -> Uncertainty:
        """The measured interval; only that of beta is resampled."""
        curve = replace(self, level=level).bias(profile)
        beta = bootstrap(self.norms(profile), curve.fit, level=level, seed=seed).beta
        ks: dict[float, Interval] = {d: open_range(curve, d, k_min, k_max) for d in deltas}
        return Uncertainty(beta, np.stack([curve.low, curve.high]), ks, level, curve.samples)


def _contributions(profile: LagProfile) -> Contributions:
    if profile.contributions is None:
        raise ValueError("the profile holds no contributions: probe with parameters=True")
    return profile.contributions
