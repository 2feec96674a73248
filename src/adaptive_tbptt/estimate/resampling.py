"""How much the estimates would change with another minibatch: a bootstrap over the samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .bias import log_bounds, smallest_k
from .decay import DecayFit, fitted_lags, slopes
from .truncation import Limits

Array = NDArray[np.float64]


Interval = tuple[float, float]


@dataclass(frozen=True)
class Uncertainty:
    """Percentile intervals of the decay rate, the bias curve and the truncation length.

    Attributes:
        beta: interval of the decay rate.
        relative: `(2, lags + 1)`, lower and upper limit of Delta(k).
        k: interval of the truncation length for each delta asked for.
        level: coverage of the intervals.
        samples: number of losses that were resampled.
    """

    beta: Interval
    relative: Array = field(repr=False)
    k: dict[float, Interval]
    level: float
    samples: int


def bootstrap(
    state_norms: ArrayLike,
    fit: DecayFit,
    *,
    deltas: Sequence[float] = (),
    k_min: int = 1,
    k_max: int = 100,
    gradient_norms: ArrayLike | None = None,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Uncertainty:
    """Resample the losses of a profile and estimate again, all resamples at once.

    The fit's tau and last lag are kept, so an interval says how noisy the estimate is at that
    choice, not how it depends on it. Methods 'max' and 'quantile' look at the extremes of the
    noise, which resampling increases: their intervals lie above the estimate rather than around it.

    Args:
        state_norms: `(lags + 1, samples)`, `LagProfile.state_norms`.
        fit: the fit to repeat: its tau, last lag and method are used.
        deltas: tolerances to give an interval of k for.
        k_min: as in `choose_truncation`.
        k_max: as in `choose_truncation`.
        gradient_norms: as in `bias_bound`; held fixed over the resamples.
        level: coverage; the paper's error bars are at 0.95.
        resamples: number of resamples.
        seed: the same seed gives the same intervals.

    >>> rng = np.random.default_rng(0)
    >>> phi = 0.8 ** np.arange(51)[:, None] * rng.lognormal(size=(51, 64))
    >>> from adaptive_tbptt import fit_decay
    >>> low, high = bootstrap(phi, fit_decay(phi, tau=0.5)).beta
    >>> low < 0.8 < high
    True
    """
    phi = np.nan_to_num(np.asarray(state_norms, dtype=np.float64), nan=0.0)
    if phi.ndim != 2 or phi.shape[1] < 2:
        raise ValueError(
            f"a bootstrap needs (lags + 1, samples) with at least two samples, got {phi.shape}"
        )
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must be in (0, 1), got {level}")
    for delta in deltas:
        Limits(delta, k_min, k_max)
    samples = phi.shape[1]
    draws = np.random.default_rng(seed).multinomial(
        samples, np.full(samples, 1 / samples), resamples
    )
    means = phi @ draws.T / samples
    # In parts: all pairs of lags for all resamples at once would be gigabytes.
    parts = np.array_split(np.arange(resamples), max(1, resamples // 50))
    log_beta = np.concatenate([_refit(phi, means[:, i], fit) for i in parts])
    norms = None if gradient_norms is None else np.asarray(gradient_norms, dtype=np.float64)
    _, log_relative = log_bounds(means, log_beta, fit.tau, norms)
    tails = [(1 - level) / 2, (1 + level) / 2]

    def interval(values: Array) -> Interval:
        low, high = np.quantile(values, tails)
        return float(low), float(high)

    with np.errstate(over="ignore"):
        beta = np.exp(log_beta)
        # Order statistics, not interpolation: between two infinite bounds lies no number.
        ordered = np.sort(log_relative, axis=1)
        picks = [round(t * (resamples - 1)) for t in tails]
        relative = np.exp(ordered[:, picks].T)
    ks = {
        d: interval(np.minimum(smallest_k(log_relative, log_beta, d, k_min, k_max), k_max))
        for d in deltas
    }
    return Uncertainty(interval(beta), relative, ks, level, samples)


def _refit(phi: Array, means: Array, fit: DecayFit) -> Array:
    """Return the slope of every resample `(resamples,)`."""
    if fit.tail == "zero":
        return np.full(means.shape[1], -np.inf)
    lags = fitted_lags(phi.mean(axis=1), fit.tau, fit.last)
    curve = means[lags]
    # A resample may by chance hold only samples that are zero at some lag: as if at the floor.
    lowest = curve[curve > 0.0].min()
    return slopes(lags, np.log(np.maximum(curve, lowest)), fit.method)
