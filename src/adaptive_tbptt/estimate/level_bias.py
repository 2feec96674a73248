"""The relative bias of a training window's gradient, measured for every context at once.

    b_j = ||E sum_{i>j} Delta_i|| / ||E sum_i Delta_i||

Delta_i is what level i adds (`level_sums.py`). Both norms come from the same groups of segments,
with the expected noise subtracted. This is a measurement, not a bound, and assumes no decay. The
expectation is over windows of the data set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .level_sums import LevelSums
from .truncation import Limits, Outcome
from .unbiased_norms import chance, ratio_limits, squared_means, student_quantile

Array = NDArray[np.float64]

# OpenBLAS stays on one thread for the 8 groups of 9 levels of an estimate while training, 64
# coordinates at a time. More rows would wake its threads anyway, and then large pieces are faster.
ROWS, FEW, MANY = 80, 64, 4096


@dataclass(frozen=True)
class LevelCurve:
    """The measured relative bias at every context, with an interval.

    The interval covers the choice of segments. It does not cover the bias beyond the longest
    context: `tail` extrapolates that.

    Attributes:
        contexts: c_0 = 0 to c_J; c_J is the reference, so its bias is 0.
        estimate: `(levels,)`, the relative bias; NaN if noise hides the gradient.
        low: `(levels,)`, lower limits.
        high: `(levels,)`, upper limits; infinite if noise hides the gradient.
        single: `(levels,)`, what the gradient of a single group misses, relative to its norm: a
            ratio of root mean squares over the groups. In training a group is one window of every
            row. Noise is part of it, so it is known even if noise hides the mean gradient.
        tail: relative bias that is left beyond the longest context, extrapolated from the last two
            levels; infinite if they do not decay, 0 if noise hides the last one.
        beta: decay per step over the last two levels; NaN if unknown.
        gradient_norm: ||E g||, with the expected noise subtracted.
        chance: how often noise alone would look as much like a gradient.
        losses: K2 of the window.
        samples: losses that were backpropagated.
        level: coverage of [low, high].
    """

    contexts: tuple[int, ...]
    estimate: Array = field(repr=False)
    low: Array = field(repr=False)
    high: Array = field(repr=False)
    single: Array = field(repr=False)
    tail: float
    beta: float
    gradient_norm: float
    chance: float
    losses: int
    samples: int
    level: float

    @property
    def lags(self) -> int:
        """The longest context."""
        return self.contexts[-1]

    @property
    def tau(self) -> int:
        """The context from which on `beta` was fitted."""
        return self.contexts[max(len(self.contexts) - 3, 0)]

    @property
    def hidden(self) -> bool:
        """Whether noise hides the gradient; more samples would help."""
        return not math.isfinite(self.high[0])

    def at(self, k: int) -> int:
        """Return the index of the longest context that is at most k."""
        if k < 0:
            raise ValueError(f"k must not be negative, got {k}: it counts steps")
        return int(np.searchsorted(self.contexts, k, side="right")) - 1

    def relative_at(self, k: int) -> float:
        """Return the estimate at the longest measured context that is at most k."""
        return float(self.estimate[self.at(k)])

    def interval_at(self, k: int) -> tuple[float, float]:
        """Return the limits at the longest measured context that is at most k."""
        index = self.at(k)
        return float(self.low[index]), float(self.high[index])

    def open_range(self, limits: Limits) -> tuple[int, int | None]:
        """Return the smallest context that may meet delta, and the smallest that surely does.

        A context counts as meeting delta only if every longer one does. The upper limits include
        the extrapolated tail: without it the longest context would meet every delta.
        """
        tail = self.tail if math.isfinite(self.tail) else 1.0
        # The bias need not fall monotonically: a context counts only if all longer ones do.
        low = np.maximum.accumulate(self.low[::-1])[::-1]
        high = np.maximum.accumulate((self.high + tail)[::-1])[::-1]
        inside = [k for k in self.contexts if limits.k_min <= k <= limits.k_max] or [limits.k_max]
        may = [k for k in inside if low[self.at(k)] < limits.delta]
        sure = [k for k in inside if high[self.at(k)] <= limits.delta]
        return (may[0] if may else limits.k_max), (sure[0] if sure else None)

    def choose(self, limits: Limits) -> tuple[int, Outcome]:
        """Return the smallest context that surely meets delta.

        The answer is resolved if that context is at most one level above the smallest one that may
        meet delta. Otherwise k moves only as far as the evidence demands.
        """
        may, sure = self.open_range(limits)
        if sure is None and not self.hidden and self.low[self.at(limits.k_max)] > limits.delta:
            return limits.k_max, Outcome.BEYOND_MAXIMUM
        if sure is None or self.at(sure) - self.at(may) > 1:
            most = limits.k_max if sure is None else sure
            now = most if limits.k_now is None else limits.k_now
            return min(max(now, may), most), Outcome.UNRESOLVED
        at_minimum = sure == limits.k_min < limits.k_max
        return sure, Outcome.MET_AT_MINIMUM if at_minimum else Outcome.MET

    def explain(self, k: int, outcome: Outcome, limits: Limits) -> str:
        """Say in a sentence what `choose` found."""
        delta = f"delta={limits.delta:g}"
        low, high = self.interval_at(k)
        measured = f"bias {self.relative_at(k):.3g} [{low:.3g}, {high:.3g}]"
        if outcome is Outcome.MET_AT_MINIMUM:
            return f"{delta} is met already at k_min={k}: {measured}"
        if outcome is Outcome.MET:
            return f"k={k} meets {delta}: {measured}"
        if outcome is Outcome.BEYOND_MAXIMUM:
            return f"no k up to {limits.k_max} meets {delta}: {measured} at {k}; using {k}"
        if self.hidden:
            return (
                f"noise hides the gradient of {self.samples} losses: it does not differ from zero "
                f"with {self.level:.0%} confidence; using k={k}"
            )
        may, sure = self.open_range(limits)
        if math.isinf(self.tail):
            return (
                f"the gradient has not decayed within {self.lags} steps, so the bias beyond them "
                f"is unknown; using k={k}"
            )
        most = limits.k_max if sure is None else sure
        return (
            f"{self.samples} losses leave open which k between {may} and {most} meets {delta}; "
            f"using {k}"
        )

    def brief(self) -> dict[str, list[Any]]:
        """Return contexts and biases in four digits, for a log; unknown ones are None."""

        def short(values: Array) -> list[float | None]:
            return [float(f"{v:.4g}") if math.isfinite(v) else None for v in values]

        return {
            "contexts": list(self.contexts),
            "bias": short(self.estimate),
            "low": short(self.low),
            "high": short(self.high),
        }


def level_bias(sums: LevelSums, level: float = 0.9) -> LevelCurve:
    """Measure the relative bias of every context.

    Args:
        sums: gradients by level, from at least two groups.
        level: coverage of the intervals: Fieller's limits of b squared from a jackknife over the
            groups, with Student's quantile, then the root.
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must be in (0, 1), got {level}")
    products, levels = _products(sums.vectors), len(sums.contexts)
    # A window with context c_j misses all levels after j: sums over pairs of such levels.
    tails = np.flip(np.flip(products, (0, 1)).cumsum(0).cumsum(1), (0, 1))
    whole = tails[0, 0]
    missed = np.stack([*(tails[j, j] for j in range(1, levels)), np.zeros_like(whole)])
    kept, cut = squared_means(whole, sums.counts), squared_means(missed, sums.counts)
    # On the diagonal, a group meets itself: squared norms with their noise.
    single = np.sqrt(np.trace(missed, axis1=1, axis2=2) / max(float(np.trace(whole)), 1e-300))
    norm, luck = math.sqrt(max(float(kept.value), 0.0)), chance(whole)
    limits = ratio_limits(cut, kept, student_quantile((1 + level) / 2, sums.groups))
    if limits is not None and luck <= (1 - level) / 2:
        squares = (cut.value / kept.value, *limits)
        estimate, low, high = (np.sqrt(np.maximum(b, 0.0)) for b in squares)
        tail, beta = _beyond(sums, products, norm, level)
    else:  # noise hides the gradient
        estimate, low, high = np.full(levels, np.nan), np.zeros(levels), np.full(levels, np.inf)
        tail, beta = math.inf, math.nan
    return LevelCurve(
        contexts=sums.contexts,
        estimate=estimate,
        low=low,
        high=high,
        single=single,
        tail=tail,
        beta=beta,
        gradient_norm=norm,
        chance=luck,
        losses=sums.losses,
        samples=sums.samples,
        level=level,
    )


def _beyond(sums: LevelSums, products: Array, norm: float, level: float) -> tuple[float, float]:
    """Extrapolate the bias beyond the longest context from what the last two levels add.

    If lag k contributes beta^k, then a level of b steps adds beta^a (1 - beta^b) / (1 - beta^a)
    times as much as the level of a steps before it. Everything beyond adds beta^b / (1 - beta^b)
    times as much as the level of b steps.
    """
    if len(sums.contexts) < 3:
        return math.inf, math.nan
    grams = np.stack([products[-2, -2], products[-1, -1]])
    before, newest = squared_means(grams, sums.counts).value
    if newest <= 0.0 or chance(grams[1]) > (1 - level) / 2:
        return 0.0, math.nan  # noise hides the last level, and more so what lies beyond
    if before <= 0.0:
        return math.inf, math.nan
    c = sums.contexts
    a, b = c[-2] - c[-3], c[-1] - c[-2]
    ratio = math.sqrt(newest / before)
    if ratio >= b / a:
        return math.inf, 1.0
    low, high = 0.0, 1.0
    for _ in range(60):  # bisection: the ratio grows with beta, from 0 to b / a
        beta = (low + high) / 2
        decayed = beta**a
        if decayed * (1 - beta**b) / (1 - decayed) < ratio:
            low = beta
        else:
            high = beta
    left = beta**b
    return math.sqrt(newest) / norm * left / (1 - left), beta


def _products(vectors: NDArray[np.float32]) -> Array:
    """Return `(levels, levels, groups, groups)`: inner products of all levels of all groups.

    In float64, a few coordinates at a time: a copy of all vectors would take twice their memory.
    For large products BLAS wakes its other threads. These wait busily for about 50 ms afterwards,
    and so take far more processor time than a small product itself.
    """
    groups, levels, size = vectors.shape
    flat = vectors.reshape(groups * levels, size)
    total = np.zeros((groups * levels, groups * levels))
    piece = FEW if len(flat) <= ROWS else MANY
    for start in range(0, size, piece):
        part = flat[:, start : start + piece].astype(np.float64)
        total += part @ part.T
    return total.reshape(groups, levels, groups, levels).transpose(1, 3, 0, 2)
