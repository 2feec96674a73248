"""Curves of a run over epochs and over time, with no more points than a screen can show."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .read import Array, Rows, Run

MOST_POINTS = 1000  # arbitrary: about as many as a wide chart has pixels


@dataclass(frozen=True)
class Curve:
    """A quantity over a run, NaN where it is missing; every array is `(points,)`.

    Attributes:
        epoch: passes over the training data by then.
        seconds: training time by then.
        y: the number.
    """

    epoch: Array
    seconds: Array
    y: Array

    @property
    def exists(self) -> bool:
        """Whether there is anything to draw."""
        return bool(np.isfinite(self.y).any())

    def thinned(self, most: int = MOST_POINTS) -> Curve:
        """Return at most `most` points: both ends, lowest and highest of each stretch."""
        if len(self.y) <= most:
            return self
        kept = {0, len(self.y) - 1}
        for part in np.array_split(np.arange(len(self.y)), most // 2 - 1):
            seen = part[np.isfinite(self.y[part])]
            if len(seen):
                kept |= {int(seen[self.y[seen].argmin()]), int(seen[self.y[seen].argmax()])}
        index = np.array(sorted(kept))
        return Curve(self.epoch[index], self.seconds[index], self.y[index])


def curve_of(run: Run, rows: Rows, key: str) -> Curve:
    """Return what rows of a run have under a key."""
    return _curve(run, rows.column("step"), rows.column(key))


def truncation_curve(run: Run) -> Curve:
    """Return K, each value at the moment it came into use."""
    both = (run.epochs, run.probes)
    steps, k = (np.concatenate([rows.column(key) for rows in both]) for key in ("step", "k"))
    order = np.argsort(steps, kind="stable")
    steps, k = steps[order], k[order]
    if order[0] < len(run.epochs):  # no estimate before: it was in use from the start
        steps, k = np.insert(steps, 0, 0.0), np.insert(k, 0, k[0])
    return _curve(run, steps, k)


def _curve(run: Run, steps: Array, y: Array) -> Curve:
    """Place numbers by the data steps at which they came.

    The rows of epochs say which epoch and how much time a step is.
    """
    ends = {key: np.insert(run.epochs.column(key), 0, 0.0) for key in ("step", "epoch", "seconds")}
    return Curve(
        epoch=np.interp(steps, ends["step"], ends["epoch"]),
        seconds=np.interp(steps, ends["step"], ends["seconds"]),
        y=y,
    )
