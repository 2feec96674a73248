"""How much do predictions change if a model reads only a part of its history?

    c_h = E |y_h - y|^2 / Var y

y is the prediction at a step after the full history, y_h that of a model that starts h steps
earlier and reads h inputs, the present one included. The expectation is over end points; the
squared norm and the variance are summed over the features of a prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .unbiased_norms import Jackknife, ratio_limits, student_quantile

Array = NDArray[np.float64]
ROUNDING = 1e-12  # of a mean square: float32 rounds to 1e-7, and kernels sum in another order


class PartSums(NamedTuple):
    """Sums over the end points of each group, for one tensor of the predictions.

    Attributes:
        changes: `(lengths, groups)`, sums of |y_h - y|^2.
        squares: `(groups,)`, sums of |y|^2.
        totals: `(groups, features)`, sums of y.
        name: of the tensor.
    """

    changes: Array
    squares: Array
    totals: Array
    name: str = ""


@dataclass(frozen=True)
class HistorySums:
    """What was measured at groups of end points; groups are independent of each other.

    Attributes:
        lengths: histories in steps, ascending.
        parts: one for each tensor of the predictions.
        counts: `(groups,)`, end points of each group.
        losses: `(lengths + 1, groups)`, the loss of each group; the last is that of full histories.
        weights: `(groups,)`, losses in each group; 0 where all targets are masked.
    """

    lengths: tuple[int, ...]
    parts: tuple[PartSums, ...]
    counts: Array
    losses: Array
    weights: Array


@dataclass(frozen=True)
class HistoryCurve:
    """The change of the predictions and the loss for every history, with intervals.

    The intervals cover the choice of end points. Those of the loss hold for its difference from
    the loss of the full history at the same end points, and are placed around that loss.

    Attributes:
        lengths: histories in steps, ascending.
        change: `(lengths,)`, c_h; of several tensors the one that changes most counts.
        low: `(lengths,)`, lower limits.
        high: `(lengths,)`, upper limits; infinite if too few end points leave them open.
        loss: `(lengths,)`.
        loss_low: `(lengths,)`, lower limits.
        loss_high: `(lengths,)`, upper limits.
        full_loss: loss of the full history.
        end_points: number of predictions compared.
        level: coverage of the intervals.
        largest: for every length the name of the tensor that changes most; empty if there is one.
    """

    lengths: tuple[int, ...]
    change: Array = field(repr=False)
    low: Array = field(repr=False)
    high: Array = field(repr=False)
    loss: Array = field(repr=False)
    loss_low: Array = field(repr=False)
    loss_high: Array = field(repr=False)
    full_loss: float
    end_points: int
    level: float
    largest: tuple[str, ...] = ()

    @property
    def loss_change(self) -> Array:
        """The relative change of the loss, `(lengths,)`: that of the further limit.

        The loss of a short history may equal that of the full one by chance, since their
        difference has either sign. A limit does not.
        """
        limits = np.stack([self.loss_low, self.loss_high]) - self.full_loss
        change = np.abs(limits).max(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(change == 0.0, 0.0, change / abs(self.full_loss))

    def shortest(self, tolerance: float) -> tuple[int | None, tuple[int | None, int | None]]:
        """Return the shortest history that meets the tolerance, and an interval for it.

        The interval goes from the shortest history that may meet the tolerance to the shortest that
        surely does. None stands for a history longer than all that were measured.
        """
        interval = self._first_below(self.low, tolerance), self._first_below(self.high, tolerance)
        return self._first_below(self.change, tolerance), interval

    def shortest_for_loss(self, tolerance: float) -> int | None:
        """Return the shortest history with both limits of the loss near the full history's loss."""
        return self._first_below(self.loss_change, tolerance)

    def _first_below(self, values: Array, tolerance: float) -> int | None:
        """Return the first history that meets the tolerance together with all longer ones."""
        met = np.flatnonzero(from_here_on(values) <= tolerance)
        return self.lengths[met[0]] if len(met) else None


def from_here_on(values: Array) -> Array:
    """Return the largest of each value and all values after it."""
    return np.maximum.accumulate(values[::-1])[::-1]


def history_curve(sums: HistorySums, level: float = 0.9) -> HistoryCurve:
    """Estimate the change of the predictions and the loss for every history.

    Args:
        sums: from at least three groups.
        level: coverage of the intervals: Fieller's limits from a jackknife over the groups for the
            change, the jackknife's standard error for the loss, both with Student's quantile.
    """
    quantile = student_quantile((1 + level) / 2, len(sums.counts))
    changes = np.stack([_change(part, sums.counts, quantile) for part in sums.parts])
    change, low, high = changes.max(axis=0)
    largest = [sums.parts[index].name for index in changes[:, 0].argmax(axis=0)]
    scored = sums.weights > 0
    losses, weights = sums.losses[:, scored], sums.weights[scored]
    full = _mean(losses[-1] * weights, weights)
    excess = _mean((losses[:-1] - losses[-1]) * weights, weights)
    deviations = excess.without_group - excess.without_group.mean(axis=-1, keepdims=True)
    groups = max(len(weights), 1)
    error = quantile * np.sqrt((groups - 1) / groups * (deviations**2).sum(axis=-1))
    loss = full.value + excess.value
    return HistoryCurve(
        lengths=sums.lengths,
        change=change,
        low=low,
        high=high,
        loss=loss,
        loss_low=loss - error,
        loss_high=loss + error,
        full_loss=float(full.value),
        end_points=int(sums.counts.sum()),
        level=level,
        largest=tuple(largest) if len(sums.parts) > 1 else (),
    )


def _change(part: PartSums, counts: Array, quantile: float) -> Array:
    """Return `(3, lengths)`: the change of one tensor, its lower and its upper limits."""
    moved, square = _mean(part.changes, counts), _mean(part.squares, counts)
    n = counts.sum()
    mean = part.totals.sum(axis=0) / n
    others = (part.totals.sum(axis=0) - part.totals) / (n - counts)[:, None]
    variance = Jackknife(
        square.value - mean @ mean, square.without_group - (others**2).sum(axis=-1)
    )
    rounding = ROUNDING * float(square.value)
    if variance.value <= rounding:  # constant predictions: any change is infinitely large
        constant = np.where(moved.value <= rounding, 0.0, np.inf)
        return np.stack([constant] * 3)
    change = moved.value / variance.value
    limits = ratio_limits(moved, variance, quantile)
    if limits is None:
        return np.stack([change, np.zeros_like(change), np.full_like(change, np.inf)])
    return np.stack([change, np.maximum(limits[0], 0.0), limits[1]])


def _mean(sums: Array, counts: Array) -> Jackknife:
    """Return the mean over all groups, and those without each group."""
    n, total = counts.sum(), sums.sum(axis=-1)
    return Jackknife(total / n, (total[..., None] - sums) / (n - counts))
