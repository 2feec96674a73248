"""From a lag profile to a bias curve: the ways to tell the relative bias of truncating at K.

A gauge is a small frozen value with one method, `bias(profile) -> BiasCurve`. `PaperGauge` and
`ReleaseGauge` look at the state alone and *guarantee* nothing: both put a stand-in where Theorem 1
has the norm of the gradient. `ParameterGauge` bounds and `MeasuredGauge` measures; they need what
each lag contributes to the parameters' gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from ..estimate.bias import BiasCurve, bias_bound
from ..estimate.decay import DecayFit, Method, fit_decay
from ..estimate.lag_profile import Array, LagProfile
from ..estimate.resampling import Uncertainty, bootstrap
from .probe_budget import ProbeBudget


@dataclass(frozen=True)
class Gauge(ABC):
    """How to read the relative bias off a profile.

    Attributes:
        tau: first lag of the decay fit; an int is a lag, a float a fraction of the window.
        method: as in `fit_decay`.
    """

    tau: int | float = 0.9
    method: Method = "ols"

    @property
    def sketch(self) -> int:
        """Size of the sketches it needs, as in `probe`; 0 where the state alone will do."""
        return 0

    @property
    def probes(self) -> ProbeBudget:
        """How many probes an estimate takes."""
        return ProbeBudget()

    def norms(self, profile: LagProfile) -> Array:
        """`(lags, samples)`: the norms whose decay is fitted; phi_k unless a gauge says else."""
        return profile.measured

    @abstractmethod
    def gradient_norms(self, profile: LagProfile) -> Array | None:
        """What `bias_bound` is to put for ||E g_k||; None for sums of phi."""

    def fit(self, profile: LagProfile) -> DecayFit:
        """Fit the decay of the mean norms."""
        mean = self.norms(profile).mean(axis=1)
        return fit_decay(mean, self.tau, self.method, floor=profile.floor)

    def bias(self, profile: LagProfile) -> BiasCurve:
        """Tell the bias at every k of the profile's window."""
        mean = self.norms(profile).mean(axis=1)
        return bias_bound(mean, self.fit(profile), self.gradient_norms(profile))

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
        """Say how much the estimates would change with other samples; see `bootstrap`."""
        return bootstrap(
            self.norms(profile),
            self.fit(profile),
            deltas=deltas,
            k_min=k_min,
            k_max=k_max,
            gradient_norms=self.gradient_norms(profile),
            level=level,
            seed=seed,
        )


@dataclass(frozen=True)
class PaperGauge(Gauge):
    """The printed paper's: sums of E phi_k, the max over k <= K."""

    def gradient_norms(self, profile: LagProfile) -> None:
        """None: `bias_bound` sums phi itself."""
        return None


@dataclass(frozen=True)
class ReleaseGauge(Gauge):
    """The authors' release's: the norm of the mean summed state gradient; the published K use it.

    What we do not repeat of the release: it counts phi_tau twice for K < tau, and its
    least-squares fit ignores tau.
    """

    def gradient_norms(self, profile: LagProfile) -> Array:
        """||E_s sum_{1<=j<=k} dL_s/dh_{s-j}||."""
        return profile.cumulative_norms
