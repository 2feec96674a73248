"""Bound the bias of truncating at K: Theorem 1, E(K) absolute and Delta(K) relative.

Pure functions of arrays, in log space. The bound M on ||dH/dtheta|| cancels in the ratio, so
`absolute` is in units of M.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .decay import DecayFit
from .truncation import Limits, Outcome

Array = NDArray[np.float64]


@dataclass(frozen=True)
class BiasCurve:
    """Bounds on the bias for every truncation length k = 0..lags.

    Attributes:
        log_absolute: `(lags + 1,)`, log E(k), in units of M.
        log_relative: `(lags + 1,)`, log Delta(k); +inf where there is no bound.
        fit: the decay that extrapolates the tail.
    """

    log_absolute: Array = field(repr=False)
    log_relative: Array = field(repr=False)
    fit: DecayFit

    @property
    def lags(self) -> int:
        """The largest lag measured."""
        return len(self.log_absolute) - 1

    @property
    def absolute(self) -> Array:
        """`(lags + 1,)`: E(k), in units of M."""
        return _exp(self.log_absolute)

    @property
    def relative(self) -> Array:
        """`(lags + 1,)`: Delta(k); infinite where there is no bound."""
        return _exp(self.log_relative)

    def relative_at(self, k: int) -> float:
        """Return Delta(k) for any k; beyond the measured lags it follows the fitted decay."""
        if k < 0:
            raise ValueError(f"k must not be negative, got {k}: it counts lags")
        beyond = max(k - self.lags, 0)
        log_value = float(self.log_relative[min(k, self.lags)])
        if beyond and math.isfinite(log_value):
            log_value += beyond * self.fit.log_beta
        return float(_exp(np.asarray(log_value)))

    @property
    def beta(self) -> float:
        """The fitted decay rate."""
        return self.fit.beta

    @property
    def tau(self) -> int:
        """The first lag of the fit."""
        return self.fit.tau

    def smallest_k(self, delta: float, k_min: int, k_max: int) -> int:
        """Return the smallest k >= k_min whose bound is below delta; k_max + 1 if there is none."""
        log_beta = np.array([self.fit.log_beta])
        return int(smallest_k(self.log_relative[:, None], log_beta, delta, k_min, k_max)[0])

    def choose(self, limits: Limits) -> tuple[int, Outcome]:
        """Return the smallest k within the limits that meets delta, or k_max and why none does."""
        k_min, k_max = limits.k_min, limits.k_max
        if not self.fit.decays:
            return k_max, Outcome.NO_DECAY
        if not np.isfinite(self.relative).any():
            return k_max, Outcome.NO_BOUND
        k = self.smallest_k(limits.delta, k_min, k_max)
        if k > k_max:
            return k_max, Outcome.BEYOND_MAXIMUM
        if k == k_min < k_max:
            return k, Outcome.MET_AT_MINIMUM
        return k, Outcome.WINDOW_TOO_SHORT if k > self.fit.tau else Outcome.MET

    def explain(self, k: int, outcome: Outcome, limits: Limits) -> str:
        """Say in a sentence what `choose` found."""
        fit, delta, k_max = self.fit, limits.delta, limits.k_max
        if outcome is Outcome.BEYOND_MAXIMUM:
            far = 100 * k_max  # arbitrary: how far to search for a k that meets delta
            first = self.smallest_k(delta, 1, far)
            where = f"; {first} would" if first <= far else ""
            return f"no k up to {k_max} meets delta={delta:g}{where}; using {k_max}"
        bound = f"with a bound of {self.relative_at(k):.3g}"
        return {
            Outcome.MET: f"k={k} meets delta={delta:g} {bound}",
            Outcome.MET_AT_MINIMUM: f"delta={delta:g} is met already at k_min={k}, {bound}",
            Outcome.WINDOW_TOO_SHORT: (
                f"k={k} meets delta={delta:g}, but lies past tau={fit.tau}, where the bound rests "
                "on the fitted decay alone; measure more lags"
            ),
            Outcome.NO_DECAY: (
                f"the gradient does not decay (beta={fit.rate} >= 1 from lag {fit.tau} on), so "
                f"no k meets delta={delta:g}; using {k_max}"
            ),
            Outcome.NO_BOUND: (
                "the relative bias has no bound: at every measured k the bound on what is cut "
                f"exceeds what is kept (beta={fit.rate}), so no k meets delta={delta:g}; using "
                f"{k_max}"
            ),
        }[outcome]


def bias_bound(phi: ArrayLike, fit: DecayFit, gradient_norms: ArrayLike | None = None) -> BiasCurve:
    """Bound the absolute and the relative bias of the gradient truncated at every K.

        E(K) = sum_{k=K+1}^{tau-1} E phi_k + E phi_tau / (1 - beta)       K < tau
        E(K) = E phi_tau * beta^(K+1-tau) / (1 - beta)                    K >= tau
        Delta(K) = E(K) / max_k (||E g_k|| - E(k))

    The paper prints beta^(K-tau) in the second line. The tail starts at lag K+1, hence one factor
    more; with it both lines agree at K = tau - 1.

    Args:
        phi: `(lags + 1,)` mean norms, `LagProfile.mean`.
        fit: from `fit_decay`.
        gradient_norms: `(lags + 1,)`, ||E g_k|| in units of M, or a stand-in for it; the max is
            then over all measured k. The authors' release uses `LagProfile.cumulative_norms`. None
            takes the sums of phi and the max over k <= K, as printed: a heuristic, since by the
            triangle inequality the sums bound ||E g_k|| from above.

    >>> from adaptive_tbptt import fit_decay
    >>> phi = 0.5 ** np.arange(11.0)
    >>> curve = bias_bound(phi, fit_decay(phi))
    >>> bool(np.isclose(curve.absolute[3], 0.5**4 / (1 - 0.5)))
    True
    """
    values = np.asarray(phi, dtype=np.float64)
    if values.ndim != 1 or len(values) <= fit.tau:
        raise ValueError(
            f"phi must be (lags + 1,) with more than tau = {fit.tau} lags, got {values.shape}"
        )
    _check(values, "phi")
    norms = None
    if gradient_norms is not None:
        norms = np.asarray(gradient_norms, dtype=np.float64)
        _check(norms, "gradient_norms")
        if norms.shape != values.shape:
            raise ValueError(f"gradient_norms must be {values.shape} like phi, got {norms.shape}")
    log_beta = np.array([fit.log_beta])
    log_absolute, log_relative = log_bounds(values[:, None], log_beta, fit.tau, norms)
    return BiasCurve(log_absolute[:, 0], log_relative[:, 0], fit)


def _check(norms: Array, name: str) -> None:
    """Refuse anything but norms; NaN at lag 0 means that it was not measured."""
    bad = ~(np.isfinite(norms) & (norms >= 0.0))
    bad[:1] &= ~np.isnan(norms[:1])
    if bad.any():
        lag = int(np.flatnonzero(bad)[0])
        raise ValueError(f"{name} must be finite norms, got {norms[lag]} at lag {lag}")


def log_bounds(
    phi: Array, log_beta: Array, tau: int, gradient_norms: Array | None = None
) -> tuple[Array, Array]:
    """Return log E and log Delta for many curves at once.

    Args:
        phi: `(lags + 1, curves)`.
        log_beta: `(curves,)`.
        tau: shared by all curves, like the gradient norms.
        gradient_norms: `(lags + 1,)`, as in `bias_bound`.
    """
    log_phi = _log(phi)
    decays = log_beta < 0.0
    rate = np.where(decays, log_beta, -1.0)
    tail = log_phi[tau] - np.log(-np.expm1(rate))  # phi_tau / (1 - beta), also for beta near 1
    beyond = tail + np.arange(1, len(phi) - tau + 1)[:, None] * rate
    terms = np.vstack([tail, log_phi[tau - 1 : 0 : -1]]) if tau > 0 else beyond[:0]
    before = np.logaddexp.accumulate(terms)[::-1] if tau > 0 else terms
    log_absolute = np.where(decays, np.vstack([before, beyond]), np.inf)

    # The denominator is a difference: compute it outside log space, in units of max phi.
    unit = log_phi.max(axis=0)
    unit = np.where(np.isfinite(unit), unit, 0.0)
    lost = _exp(log_absolute - unit)
    if gradient_norms is None:
        kept = np.cumsum(_exp(log_phi - unit), axis=0)
        denominator = np.maximum.accumulate(kept - lost)
    else:
        kept = _exp(_log(gradient_norms)[:, None] - unit)
        denominator = np.broadcast_to((kept - lost).max(axis=0), log_absolute.shape)
    bounded = denominator > 0.0
    log_denominator = _log(np.where(bounded, denominator, 1.0)) + unit
    return log_absolute, np.where(bounded, log_absolute - log_denominator, np.inf)


def smallest_k(
    log_relative: Array, log_beta: Array, delta: float, k_min: int, k_max: int
) -> NDArray[np.int64]:
    """Return the smallest k >= k_min that meets delta, for many curves; k_max + 1 if none does.

    Beyond the measured lags the bound follows the fitted decay.

    Args:
        log_relative: `(lags + 1, curves)`, nonincreasing in k.
        log_beta: `(curves,)`.
        delta: the tolerance.
        k_min: smallest k to return.
        k_max: largest k to try.
    """
    lags, asked = len(log_relative) - 1, math.log(delta)
    # Bisection beyond the lags, because k_max may be far larger than memory: `high` meets delta.
    low = np.zeros(len(log_beta), np.int64)
    high = low + max(k_max - lags, 0) + 1
    with np.errstate(invalid="ignore"):  # inf - inf, where there is no bound
        while (high - low > 1).any():
            middle = (low + high) // 2
            met = log_relative[-1] + middle * np.minimum(log_beta, 0.0) < asked
            low, high = np.where(met, low, middle), np.where(met, middle, high)
    met = log_relative < asked
    first = np.where(met.any(axis=0), met.argmax(axis=0), lags + high)
    return np.minimum(np.maximum(first, k_min), k_max + 1)


def _log(values: Array) -> Array:
    return np.log(values, out=np.full_like(values, -np.inf), where=values > 0.0)


def _exp(logs: Array) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        return np.exp(logs)
