"""From a lag profile to a bias curve: the ways to stand in for ||E g_k|| that need no parameters.

A gauge is a small frozen value with one method, `bias(profile) -> BiasCurve`. Neither gauge here
*guarantees* the relative bias: both put a stand-in where Theorem 1 has the norm of the gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from .bias import BiasCurve, bias_bound
from .decay import DecayFit, Method, fit_decay
from .profile import Array, LagProfile


@dataclass(frozen=True)
class Gauge(ABC):
    """How to read the relative bias off a profile.

    Attributes:
        tau: first lag of the decay fit; an int is a lag, a float a fraction of the window.
        method: as in `fit_decay`.
    """

    tau: int | float = 0.9
    method: Method = "ols"

    @abstractmethod
    def gradient_norms(self, profile: LagProfile) -> Array | None:
        """What to put for ||E g_k||; None for sums of phi."""

    def fit(self, profile: LagProfile) -> DecayFit:
        """Fit the decay of the profile's mean."""
        return fit_decay(profile.mean, self.tau, self.method, floor=profile.floor)

    def bias(self, profile: LagProfile) -> BiasCurve:
        """Bound the bias at every k of the profile's window."""
        return bias_bound(profile.mean, self.fit(profile), self.gradient_norms(profile))


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
        """||E_s sum_{j<=k} dL_s/dh_{s-j}||."""
        return profile.cumulative_norms
