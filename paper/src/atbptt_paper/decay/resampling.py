"""How much the estimates would change with another minibatch: a bootstrap over the samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from adaptive_tbptt import bias_bound, fit_decay
from adaptive_tbptt.estimate import DecayFit, Limits

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
    """Resample the losses of a profile and estimate again.

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
    bounds = [
        bias_bound(mean, _refit(phi, mean, fit), gradient_norms) for mean in draws @ phi.T / samples
    ]
    tails = [(1 - level) / 2, (1 + level) / 2]

    def interval(values: Sequence[float]) -> Interval:
        low, high = np.quantile(values, tails)
        return float(low), float(high)

    # Order statistics, not interpolation: between two infinite bounds lies no number.
    relative = np.sort([bound.relative for bound in bounds], axis=0)
    picks = [round(t * (resamples - 1)) for t in tails]
    ks = {
        d: interval([min(bound.smallest_k(d, k_min, k_max), k_max) for bound in bounds])
        for d in deltas
    }
    return Uncertainty(interval([b.beta for b in bounds]), relative[picks], ks, level, samples)


def _refit(phi: Array, mean: Array, fit: DecayFit) -> DecayFit:
    """Fit the mean of a resample on the lags of `fit`."""
    if fit.tail == "zero":
        return fit
    lags = np.arange(fit.tau, fit.last + 1)
    lags = lags[phi[lags].any(axis=1)]
    curve = np.zeros(fit.last + 1)
    # A resample may by chance hold only samples that are zero at some lag: as if at the floor.
    curve[lags] = np.maximum(mean[lags], mean[lags][mean[lags] > 0.0].min())
    return fit_decay(curve, fit.tau, fit.method, floor=0.0)
