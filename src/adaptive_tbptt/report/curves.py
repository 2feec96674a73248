"""Curves of a run over epochs and over time, with no more points than a screen can show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .read import Row, Run

Array = NDArray[np.float64]
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


def curve_of(run: Run, rows: Sequence[Row], key: str) -> Curve:
    """Return the values of rows of a run under a key.

    Rows count data steps; the rows of epochs convert these to epochs and seconds.
    """
    steps, ends = numbers(rows, "step"), [0.0, *numbers(run.epochs, "step")]
    return Curve(
        epoch=np.interp(steps, ends, [0.0, *numbers(run.epochs, "epoch")]),
        seconds=np.interp(steps, ends, [0.0, *numbers(run.epochs, "seconds")]),
        y=numbers(rows, key),
    )


def truncation_curve(run: Run) -> Curve:
    """Return K, each value at the moment it came into use."""
    rows = sorted([*run.epochs, *run.probes], key=lambda row: row["step"])
    if rows[0].get("event") == "epoch":  # no estimate before: this K was in use from the start
        rows = [{"step": 0, "k": rows[0]["k"]}, *rows]
    return curve_of(run, rows, "k")


def numbers(rows: Sequence[Row], key: str) -> Array:
    """Return a column of rows, NaN for missing values."""
    return np.array([row.get(key) for row in rows], dtype=np.float64)
