"""One call: how biased is my loop, and what would more context cost?"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import nn

from .. import defaults
from ..data.nest import Nest
from ..data.stream import Stream
from ..estimate.level_bias import LevelCurve, level_bias
from ..estimate.level_sums import LevelSums, levels_up_to
from ..estimate.unbiased_norms import groups_needed
from ..measure.sampling import LagRequest, LevelRequest, Source
from ..model.checks import look, refuse_single_losses
from ..model.objective import CountLosses, Objective
from ..model.recurrent import LossFn, Recurrent
from ..truncate.gauges import PaperGauge
from .bias_check import GROUPS, SIZE
from .sampling import Sampling, as_stream
from .window_cost import window_costs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PILOT = 8  # windows that tell how many are needed
PRECISION = 0.1  # aimed at: half the width of an interval, relative to a bias above NOTABLE
NOTABLE = 0.05  # a smaller bias need not be known as precisely


class Row(NamedTuple):
    """What a loop with some context misses.

    Attributes:
        losses: steps of a window that carry a loss.
        context: steps before them that the gradient also flows through; 0 is the detach loop.
        bias: relative bias of the gradient; NaN where noise hides it.
        low: lower limit.
        high: upper limit.
        cost: time of a forward and backward pass, relative to the loop without context.
        bound: the paper's bound on the bias of a single loss; None unless asked for.
    """

    losses: int
    context: int
    bias: float
    low: float
    high: float
    cost: float
    bound: float | None = None


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found; print it, turn it into a dict, or draw it.

    Attributes:
        rows: one per context; the first is your loop as it is.
        recommendation: what to do, in a sentence.
        curve: the measured bias behind the rows.
        delta: the bias that the recommendation tolerates.
        notes: what a reader should know before trusting the table.
        seconds: how long the measurement took.
    """

    rows: tuple[Row, ...]
    recommendation: str
    curve: LevelCurve = field(repr=False)
    delta: float
    notes: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        head = ["context", "misses", f"{self.curve.level:.0%} interval", "cost"]
        bounds = any(row.bound is not None for row in self.rows)
        table = [(*head, "paper's bound", "") if bounds else (*head, "")]
        for row in self.rows:
            cells = [str(row.context), *_shares(row), f"{row.cost:.2f} x"]
            if bounds:
                cells.append("" if row.bound is None else f"{row.bound:.3g}")
            table.append((*cells, "your loop as it is" if row.context == 0 else ""))
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]) - 1)]
        lines = [
            "  ".join([*(c.rjust(w) for c, w in zip(row, widths, strict=False)), row[-1]]).rstrip()
            for row in table
        ]
        title = (
            f"windows of {self.curve.losses} losses; share of the gradient that is missed, against "
            f"{self.curve.lags} steps of context"
        )
        notes = [f"note: {text}" for text in self.notes]
        return "\n".join([title, *lines, self.recommendation, *notes])

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings, ready for JSON; what is not known becomes None."""

        def plain(value: Any) -> Any:
            return None if isinstance(value, float) and not math.isfinite(value) else value

        return {
            "rows": [{k: plain(v) for k, v in row._asdict().items()} for row in self.rows],
            "recommendation": self.recommendation,
            "losses": self.curve.losses,
            "lags": self.curve.lags,
            "samples": self.curve.samples,
            "level": self.curve.level,
            "tail": plain(self.curve.tail),
            "seconds": self.seconds,
            "notes": list(self.notes),
        }

    def figure(self, path: str | Path | None = None) -> Figure:
        """Draw bias against context and against cost; save it where a path is given."""
        from .figures import bias_figure

        return bias_figure(self.rows, self.curve, path)


def diagnose(
    model: nn.Module | Recurrent,
    loss_fn: LossFn,
    data: Stream | tuple[Nest, Nest],
    losses: int = defaults.LOSSES,
    *,
    delta: float = defaults.DELTA,
    lags: int | None = None,
    seconds: float = defaults.SECONDS,
    segments: int | None = None,
    bound: bool = False,
    count_losses: CountLosses | None = None,
    sampling: Sampling | None = None,
    show: bool = True,
) -> Diagnosis:
    """Measure how much of the gradient a training loop misses, and what more context would cost.

    For windows of `losses` steps that carry a loss, every context (0 and powers of two) gets a row:
    the relative bias of the gradient with its interval, and the time of a window relative to the
    plain detach loop. One pass measures all contexts, for any module.

    Args:
        model: any recurrent module, at the parameters and in the mode to be diagnosed.
        loss_fn: `loss_fn(outputs, targets)`. A loss that is no mean over time (normalised over the
            window, say) is measured as you train with it.
        data: a stream, or a pair `(inputs, targets)` laid out as the model takes it.
        losses: steps per window of your loop; 1 asks about single losses, as the paper does.
        delta: the bias that you tolerate; the recommendation meets it.
        lags: longest context to compare with; None is 256, or less where the data are shorter.
        seconds: what the measurement may take.
        segments: windows to backpropagate, instead of `seconds`.
        bound: also give the paper's bound, from norms of the state's gradient.
        count_losses: as in `AdaptiveTBPTT`, where targets are masked.
        sampling: burn-in, mode, coverage and seed.
        show: say on standard error how far it is, if it takes longer than two seconds.

    Returns:
        `.rows`, `.recommendation`, `.figure()`. The intervals cover what other windows of the same
        data would change; what lies beyond `lags` is extrapolated and reported in a note.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> data = torch.randn(400, 16, 3), torch.randn(400, 16, 8)
    >>> found = diagnose(nn.LSTM(3, 8), nn.functional.mse_loss, data, losses=10, lags=64)
    >>> found.rows[0].context, found.rows[0].bias < 0.3
    (0, True)
    """
    began = time.monotonic()
    how = sampling or Sampling()
    objective = Objective.of(model, loss_fn, count_losses)
    stream = as_stream(data, objective.recurrent)
    if losses < 1:
        raise ValueError(f"losses must be at least 1 step, got {losses}")
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must be in (0, 1), got {delta}: 0.1 tolerates a bias of 10 %")
    lags = _fitting_lags(stream, lags, losses, how.burn_in)
    source = how.source(objective, stream)
    first = stream.peek(64)
    look(objective, first, stream)
    if losses == 1:
        refuse_single_losses(objective, first)
    contexts = levels_up_to(lags)
    request = LevelRequest(contexts, losses, PILOT, size=SIZE)
    sums = _measure(source, request, how.level, (seconds, segments), show)
    curve = level_bias(sums, how.level)
    costs = window_costs(source, losses, contexts)
    bounds: list[float | None] = [None] * len(contexts)
    if bound:
        profile = LagRequest(lags, math.ceil(how.samples / stream.rows)).measure(source)
        paper = PaperGauge().bias(profile)
        bounds = [paper.relative_at(c) for c in contexts]
    columns = zip(contexts, curve.estimate, curve.low, curve.high, costs, bounds, strict=True)
    rows = tuple(
        Row(losses, context, float(bias), float(low), float(high), float(cost), limit)
        for context, bias, low, high, cost, limit in columns
    )[:-1]  # the longest context is what the others are compared with
    return Diagnosis(
        rows=rows,
        recommendation=recommend(rows, curve, delta),
        curve=curve,
        delta=delta,
        notes=tuple(_notes(curve, sums)),
        seconds=time.monotonic() - began,
    )


def _fitting_lags(stream: Stream, lags: int | None, losses: int, burn_in: int) -> int:
    """Return how far back to look; refuse more than the data hold."""
    room = None if stream.length is None else stream.length - burn_in - losses
    if room is not None and room < 1:
        raise ValueError(
            f"rows of {stream.length} steps are too short for a burn-in of {burn_in} and "
            f"{losses} losses with any context: give longer rows, fewer losses, or less burn-in"
        )
    if lags is None:
        return defaults.LAGS if room is None else min(defaults.LAGS, room)
    if lags < 1 or (room is not None and lags > room):
        raise ValueError(
            f"lags must be in [1, {room}] for rows of {stream.length} steps, a burn-in of "
            f"{burn_in} and {losses} losses, got {lags}"
        )
    return lags


def _measure(
    source: Source,
    request: LevelRequest,
    level: float,
    budget: tuple[float, int | None],
    show: bool,
) -> LevelSums:
    """Measure in two stages: a pilot tells how many windows the aimed precision needs.

    The number of the second stage is fixed before it starts. Stopping as soon as an interval is
    narrow would make intervals narrow by luck.
    """
    seconds, segments = budget
    needed = groups_needed(level)
    if segments is not None and segments < needed:
        raise ValueError(
            f"it takes at least {needed} segments to tell a gradient from noise at level "
            f"{level:g}, got {segments}"
        )
    report = _Progress(show)
    began = time.monotonic()
    pilot = min(PILOT, segments or PILOT)
    sums = _sized(request, pilot).measure(source, progress=report)
    if segments is None:
        each = (time.monotonic() - began) / pilot
        affordable = int((seconds - (time.monotonic() - began)) / max(each, 1e-9))
        wanted = _wanted(level_bias(sums, level), pilot)
        more = min(max(wanted - pilot, 0), affordable)
        more = max(more, 2 * needed - pilot)  # fewer would not tell a gradient from noise
    else:
        more = segments - pilot
    if more > 0:
        report.done = pilot
        rest = _sized(request, more).measure(source, progress=report, before=pilot)
        sums = LevelSums.concatenate([sums, rest])
    report.close()
    return sums


def _sized(request: LevelRequest, segments: int) -> LevelRequest:
    return LevelRequest(request.contexts, request.losses, segments, GROUPS, request.size)


def _wanted(curve: LevelCurve, pilot: int) -> int:
    """Return how many windows the precision aimed at needs, by what the pilot saw."""
    if curve.hidden:
        return 32 * pilot
    notable = curve.estimate > NOTABLE
    if not notable.any():
        return 4 * pilot
    widths = (curve.high - curve.low)[notable] / 2 / curve.estimate[notable]
    return max(4 * pilot, math.ceil(pilot * (float(widths.max()) / PRECISION) ** 2))


class _Progress:
    """Say on standard error how far a measurement is, once it takes longer than two seconds."""

    def __init__(self, show: bool) -> None:
        self._show, self._began, self._said = show, time.monotonic(), False
        self.done = 0

    def __call__(self, done: int, total: int) -> None:
        if self._show and time.monotonic() - self._began > 2.0 and sys.stderr.isatty():
            self._said = True
            text = f"\rmeasuring: window {self.done + done} of {self.done + total} "
            print(text, end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._said:
            print("\r" + " " * 48 + "\r", end="", file=sys.stderr, flush=True)


def recommend(rows: tuple[Row, ...], curve: LevelCurve, delta: float) -> str:
    """Say in a sentence what to do about a loop."""
    loop = rows[0]
    if curve.hidden:
        return (
            f"Noise hides the gradient of {curve.samples} losses: give more rows, more data or "
            "more seconds"
        )
    misses = f"misses {loop.bias:.0%} [{loop.low:.0%}, {loop.high:.0%}] of the gradient"
    one = "A single loss truncated at its own step" if loop.losses == 1 else "Your loop"
    steps = "" if loop.losses == 1 else f" with {loop.losses} steps"
    if loop.high <= delta:
        return f"{one}{steps} {misses}: it needs no context."
    enough = next((r for r in rows[1:] if _stays_below(rows, r, delta)), None)
    halved = next((r for r in rows[1:] if r.bias <= loop.bias / 2), None)
    last = rows[-1]
    if enough is None:
        if last.low > delta or halved is None:
            return (
                f"{one}{steps} {misses}. No context up to {last.context} is shown to bring that "
                f"below {delta:.0%}: at {last.context} it is {last.bias:.0%} "
                f"[{last.low:.0%}, {last.high:.0%}] at {last.cost:.1f} times the cost."
            )
        return (
            f"{one}{steps} {misses}; {_would(halved)}. Which context brings it below {delta:.0%} "
            f"is left open by {curve.samples} losses."
        )
    if halved is None or halved.context >= enough.context:
        return f"{one}{steps} {misses}; {_would(enough)}."
    return (
        f"{one}{steps} {misses}; {_would(halved)}, {enough.context} to {enough.bias:.0%} at "
        f"{enough.cost:.1f} times."
    )


def _stays_below(rows: tuple[Row, ...], row: Row, delta: float) -> bool:
    return all(r.high <= delta for r in rows if r.context >= row.context)


def _would(row: Row) -> str:
    steps = "step" if row.context == 1 else "steps"
    return (
        f"{row.context} {steps} of context would bring that to {row.bias:.0%} at {row.cost:.1f} "
        "times the cost"
    )


def _shares(row: Row) -> tuple[str, str]:
    if not math.isfinite(row.high):
        return "?", "not resolved"
    return f"{row.bias:.1%}", f"[{row.low:.1%}, {row.high:.1%}]"


def _notes(curve: LevelCurve, sums: LevelSums) -> list[str]:
    notes = []
    if not curve.hidden:
        notes.append(
            f"the {curve.level:.0%} intervals cover the choice of windows: {curve.samples} losses "
            f"in {sums.groups} groups"
        )
    if math.isinf(curve.tail) and not curve.hidden and len(curve.contexts) > 2:
        notes.append(
            f"the gradient has not decayed within {curve.lags} steps: what lies beyond them is not "
            "part of these numbers; look further back with lags="
        )
    elif math.isfinite(curve.tail) and curve.tail > 0.01:
        notes.append(
            f"beyond {curve.lags} steps another {curve.tail:.1%} is left, by extrapolation; it is "
            "not part of these numbers"
        )
    if sums.unreached:
        names = ", ".join(sums.unreached[:5]) + (", ..." if len(sums.unreached) > 5 else "")
        notes.append(f"no gradient reaches these parameters: {names}")
    if not np.isfinite(curve.high).all() and not curve.hidden:
        notes.append("some rows are not resolved: more seconds would help")
    return notes
