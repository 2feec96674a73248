"""The relative bias itself, ||E g_K - E g|| / ||E g||, measured at every K of the window.

What is cut at K is the sum of the later contributions, so all K come from one pass. Nothing here
bounds: both norms are estimated from the same samples, freed of their noise, and the interval says
what the noise leaves open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Integral
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .bias import BiasCurve, bias_bound
from .contributions import Contributions
from .decay import DecayFit
from .unbiased_norms import SquaredMeans, chance, quantile, spread, squared_means

Array = NDArray[np.float64]


@dataclass(frozen=True)
class MeasuredCurve(BiasCurve):
    """The measured relative bias at every truncation length k = 0..lags.

    `log_relative` is the upper limit, so that a k which meets delta by it really does, made
    nonincreasing: a k counts as meeting delta when it and every larger one of the window do.

    Attributes:
        estimate: `(lags + 1,)`, the relative bias; NaN where the gradient is hidden by noise.
        low: `(lags + 1,)`, lower limit.
        high: `(lags + 1,)`, upper limit; infinite where the gradient is hidden by noise.
        gradient_norm: ||E g||, freed of noise.
        chance: how often pure noise would look as much like a gradient; see `squared_means.py`.
        samples: losses sampled.
        level: coverage of [low, high].
    """

    estimate: Array = field(repr=False)
    low: Array = field(repr=False)
    high: Array = field(repr=False)
    gradient_norm: float
    chance: float
    samples: int
    level: float


class _Whole(NamedTuple):
    """The gradient of the whole lags, all lags kept."""

    square: SquaredMeans
    norm: float
    chance: float
    hidden: bool


def _whole(contributions: Contributions, level: float) -> _Whole:
    sketches = contributions.sketches.sum(axis=0)
    square, luck = squared_means(sketches, contributions.sizes), chance(sketches)
    smallest = min(float(square.without_group.min()), float(square.without_block.min()))
    hidden = luck > (1 - level) / 2 or smallest <= 0.0
    norm = math.sqrt(max(float(square.value), 0.0) / square.pairs)
    return _Whole(square, norm, luck, hidden)


def gradient_norm(contributions: Contributions, level: float) -> tuple[float, float]:
    """Return ||E g_R||, the whole window's gradient, and its lower limit; 0 where noise hides it.

    The limit is taken on a log scale, as gradients have heavy tails.
    """
    square, norm, _, hidden = _whole(contributions, level)
    if hidden:
        return norm, 0.0
    limit = quantile((1 + level) / 2, len(contributions.sizes))
    margin = limit * float(spread(np.log(square.without_group), np.log(square.without_block)))
    return norm, norm * math.exp(-margin / 2)


def losses_of(losses: int | float, k: int) -> int:
    """Return K2, the losses of a window: an int is a number of steps, a float a multiple of K."""
    return int(losses) if isinstance(losses, Integral) else max(1, round(losses * k))


def cut_weights(lags: int, losses: int | float | None = None) -> Array:
    """Return `(lags, lags)`: how much of lag k is missing in the gradient truncated at K.

    Args:
        lags: number of lags.
        losses: None truncates a single loss: all of every lag beyond K is missing. Otherwise the
            gradient of a training window with so many losses (a float is a multiple of K): the
            later ones see further back, so what is missing grows from 0 to all over K2 lags.
    """
    k, lag = np.arange(lags)[:, None], np.arange(lags)[None, :]
    if losses is None:
        return (lag > k).astype(np.float64)
    k2 = np.array([losses_of(losses, i) for i in range(lags)])[:, None]
    return np.clip((lag - k) / k2, 0.0, 1.0)


def measured_bias(
    contributions: Contributions,
    fit: DecayFit,
    *,
    losses: int | float | None = None,
    level: float = 0.9,
) -> MeasuredCurve:
    """Measure the relative bias of truncating at every K.

    Args:
        contributions: with sketches, of at least two groups.
        fit: the decay of `contributions.mean`; what lies beyond the window is its word.
        losses: as in `cut_weights`.
        level: coverage of the interval; a one-sided limit errs half as often.
    """
    z = contributions.sketches
    if not z.shape[2]:
        raise ValueError("the bias is measured from sketches: probe with sketch=1024, say")
    whole = _whole(contributions, level)
    if whole.hidden:
        points = contributions.lags + 1
        nothing = np.full(points, np.nan)
        estimate, low, high = nothing, np.zeros(points), np.full(points, np.inf)
    else:
        weights = cut_weights(contributions.lags, losses).astype(z.dtype)
        cut = squared_means(np.tensordot(weights, z, axes=1), contributions.sizes)
        ratio = cut.value / whole.square.value
        margin = quantile((1 + level) / 2, len(contributions.sizes)) * spread(
            cut.without_group / whole.square.without_group,
            cut.without_block / whole.square.without_block,
        )
        beyond = bias_bound(contributions.mean, fit).absolute[-1] / whole.norm
        # Truncated at the last lag, nothing of the window is cut.
        ratio, margin = np.append(ratio, 0.0), np.append(margin, 0.0)
        estimate = np.sqrt(np.maximum(ratio, 0.0)) + beyond
        low = np.maximum(np.sqrt(np.maximum(ratio - margin, 0.0)) - beyond, 0.0)
        high = np.sqrt(np.maximum(ratio + margin, 0.0)) + beyond
    with np.errstate(divide="ignore"):
        log_high = np.log(np.maximum.accumulate(high[::-1])[::-1])
        log_absolute = log_high + np.log(whole.norm) if whole.norm > 0.0 else log_high
    return MeasuredCurve(
        log_absolute=log_absolute,
        log_relative=log_high,
        fit=fit,
        estimate=estimate,
        low=low,
        high=high,
        gradient_norm=whole.norm,
        chance=whole.chance,
        samples=contributions.norms.shape[1],
        level=level,
        hidden=whole.hidden,
    )
