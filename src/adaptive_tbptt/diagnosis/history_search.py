"""Which histories `lookback` measures: a pilot shows where the answer lies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from ..estimate.history_curve import HistoryCurve, from_here_on, history_curve
from ..estimate.level_sums import levels_up_to
from ..measure.end_points import COLUMNS, EndPoints
from ..measure.histories import Histories

PILOT = 4  # groups that show where the answer lies, and at least 64 end points
FEWEST, MOST = 8, 16  # groups of the measurement; each has up to 64 end points
PER_OCTAVE = 16  # histories near an answer: each is 4 % longer than the one before
AT_MOST = 24  # of them; where the pilot leaves more than this open, they are further apart
NEAR = 2.0  # the pilot may be wrong about a change by this factor


@dataclass(frozen=True)
class Search:
    """What to look for.

    Attributes:
        longest: longest history to try.
        tolerance: tolerated change of the predictions.
        level: coverage of the intervals.
        most: groups to measure at most.
    """

    longest: int
    tolerance: float
    level: float
    most: int = MOST

    def run(self, probe: Histories, groups: Iterator[EndPoints], seconds: float) -> HistoryCurve:
        """Measure powers of two on a few groups, then also the histories near the answer on more.

        The number of groups is fixed before the second stage: stopping once an interval is narrow
        would favour intervals that are narrow by luck.

        Args:
            probe: runs the model.
            groups: end points, as many as may be needed.
            seconds: time limit; it yields to the fewest groups that give an interval.
        """
        began = time.monotonic()
        coarse = levels_up_to(self.longest)[1:]
        kept: list[EndPoints] = []
        while len(kept) < PILOT or sum(points.history.rows for points in kept) < COLUMNS:
            if (points := next(groups, None)) is None:
                break
            kept.append(points)
        drawn = time.monotonic() - began
        lengths = self.near_answer(history_curve(probe.measure(kept, coarse), self.level))
        ran = time.monotonic() - began - drawn
        each = (drawn + ran * sum(lengths) / sum(coarse)) / len(kept)
        affordable = int((seconds - drawn - ran) / max(each, 1e-9))
        more = min(max(affordable, FEWEST), self.most) - len(kept)
        sums = probe.measure(chain(kept, islice(groups, max(more, 0))), lengths)
        return history_curve(sums, self.level)

    def near_answer(self, pilot: HistoryCurve) -> tuple[int, ...]:
        """Return the histories of the pilot, and closely spaced ones where an answer may lie."""
        found = set(pilot.lengths)
        for values in (pilot.change, pilot.loss_change):
            worst, coarse = from_here_on(values), np.array(pilot.lengths)
            above = coarse[worst > NEAR * self.tolerance]
            below = coarse[worst <= self.tolerance / NEAR]
            low = int(above[-1]) if len(above) else 1
            high = int(below[0]) if len(below) else self.longest
            if low < high:
                count = 1 + min(round(PER_OCTAVE * np.log2(high / low)), AT_MOST)
                found |= set(np.geomspace(low, high, count).round().astype(int).tolist())
        return tuple(sorted(found))
