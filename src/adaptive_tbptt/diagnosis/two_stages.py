"""How many windows `diagnose` measures: a pilot shows how many the target precision needs."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import replace

from ..estimate.level_bias import LevelCurve, level_bias
from ..estimate.level_sums import LevelSums
from ..estimate.unbiased_norms import groups_needed
from ..measure.sampling import LevelRequest, Source

PILOT = 8  # windows of the first stage
PRECISION = 0.1  # the target: half the width of an interval, relative to a bias above NOTABLE
NOTABLE = 0.05  # a smaller bias need not be known as precisely


def measure_in_two_stages(
    source: Source,
    request: LevelRequest,
    level: float,
    budget: tuple[float, int | None],
    show: bool,
) -> LevelSums:
    """Measure as many windows as the target precision needs and the budget allows.

    The second stage fixes its number of windows before it starts. Stopping as soon as an interval
    is narrow would favour intervals that are narrow by luck.

    Args:
        source: model, loss and data.
        request: what to measure; its number of segments is replaced.
        level: coverage of the intervals.
        budget: seconds, and the number of windows to measure instead, or None.
        show: whether to show progress.
    """
    seconds, segments = budget
    report = _Progress(show)
    began = time.monotonic()
    pilot = min(PILOT, segments or PILOT)
    sums = replace(request, segments=pilot).measure(source, progress=report)
    if segments is None:
        each = (time.monotonic() - began) / pilot
        affordable = int((seconds - (time.monotonic() - began)) / max(each, 1e-9))
        more = int(min(max(_wanted(level_bias(sums, level), pilot) - pilot, 0), affordable))
        # Fewer could not distinguish a gradient from noise.
        more = max(more, 2 * groups_needed(level) - pilot)
    else:
        more = segments - pilot
    if more > 0:
        report.done = pilot
        rest = replace(request, segments=more).measure(source, progress=report, before=pilot)
        sums = LevelSums.concatenate([sums, rest])
    report.close()
    return sums


def _wanted(curve: LevelCurve, pilot: int) -> float:
    """Return how many windows the target precision needs, judged by the pilot.

    If noise hides the gradient of the pilot, that is unknown: take all that the budget allows.
    """
    if curve.hidden:
        return math.inf
    notable = curve.estimate > NOTABLE
    if not notable.any():
        return 4 * pilot
    widths = (curve.high - curve.low)[notable] / 2 / curve.estimate[notable]
    return max(4 * pilot, math.ceil(pilot * (float(widths.max()) / PRECISION) ** 2))


class _Progress:
    """Show progress on standard error, once a measurement takes longer than two seconds."""

    def __init__(self, show: bool) -> None:
        self._show = show and sys.stderr is not None and sys.stderr.isatty()
        self._began, self._said = time.monotonic(), False
        self.done = 0

    def __call__(self, done: int, total: int) -> None:
        if self._show and time.monotonic() - self._began > 2.0:
            self._said = True
            text = f"\rmeasuring: window {self.done + done} of {self.done + total} "
            print(text, end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._said:
            print("\r" + " " * 48 + "\r", end="", file=sys.stderr, flush=True)
