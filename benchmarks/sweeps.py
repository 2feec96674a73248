"""Cost against the lags R of a probe, the truncation length K, the data's length T, hidden size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from adaptive_tbptt.diagnosis.palette import BLUE, GREEN, ORANGE, VERMILION
from adaptive_tbptt.measure import ProbeSettings
from adaptive_tbptt.measure.lag_probe import probe_segment
from adaptive_tbptt.model import Objective
from atbptt_paper.labels import label_ends
from atbptt_paper.tasks.sequence_model import symbol_loss
from contenders import (
    Size,
    Timing,
    one_pass,
    probe_by_hand,
    products,
    take_turns,
    training_contenders,
)

Sweep = Callable[[int, bool], list[Timing]]


_BY_HAND_UP_TO = 1000  # steps: beyond, a graph of every step takes gigabytes


def _probe_at(sweep: str, value: int, size: Size, turns: int) -> list[Timing]:
    model = size.model()
    objective = Objective.of(model, symbol_loss)
    segment = size.stream(size.lags).segment(0, size.lags)
    contenders: dict[str, Callable[[], object]] = {
        "ours": lambda: probe_segment(objective, segment, settings=ProbeSettings()),
        "bare products": lambda: products(size, size.lags, 3),
    }
    if size.lags <= _BY_HAND_UP_TO:
        contenders["by hand"] = lambda: probe_by_hand(model, segment.inputs, segment.targets)
        contenders["one fused pass"] = lambda: one_pass(model, segment.inputs, segment.targets)
    return take_turns(sweep, str(value), contenders, turns)


def sweep_lags(turns: int, smoke: bool) -> list[Timing]:
    """Seconds of one probe against R: 128 units, 64 rows."""
    values = [10, 20] if smoke else [100, 300, 1000, 3000, 10_000]
    return [
        t
        for r in values
        for t in _probe_at("R", r, Size("", 128, 1, 20, 64, r, (), 0, 0), min(turns, 3))
    ]


def sweep_hidden(turns: int, smoke: bool) -> list[Timing]:
    """Seconds of one probe against the hidden size: R = 200, 32 rows."""
    values = [4, 8] if smoke else [32, 64, 128, 256, 512, 1024]
    lags = 10 if smoke else 200
    return [
        t
        for h in values
        for t in _probe_at("hidden size", h, Size("", h, 1, 20, 32, lags, (), 0, 0), turns)
    ]


def _training_at(sweep: str, value: int, steps: int, k: int, turns: int) -> list[Timing]:
    size = Size("", 50, 2, 6, 64, 100, (), 0, 0)
    contenders = training_contenders(size, steps, k)
    return take_turns(sweep, str(value), contenders, turns, steps * size.rows)


def sweep_truncation(turns: int, smoke: bool) -> list[Timing]:
    """Seconds to train on 1200 steps against K, at the size of the copy task."""
    values, steps = ([2, 4], 20) if smoke else ([5, 10, 20, 50, 100, 200], 1200)
    return [t for k in values for t in _training_at("K", k, steps, k, turns)]


def sweep_length(turns: int, smoke: bool) -> list[Timing]:
    """Seconds to train on T steps at K = 20, at the size of the copy task."""
    values = [20, 40] if smoke else [500, 1000, 2000, 4000, 8000]
    return [t for steps in values for t in _training_at("T", steps, steps, 20, min(turns, 3))]


SWEEPS: dict[str, Sweep] = {
    "R": sweep_lags,
    "hidden size": sweep_hidden,
    "K": sweep_truncation,
    "T": sweep_length,
}


_LABELS = {
    "R": "lags R of one probe (steps)",
    "hidden size": "hidden size, one probe of R = 200 (units)",
    "K": "truncation length K, training on 1200 steps",
    "T": "length T of the data, training at K = 20 (steps)",
}


_STYLES = {
    "ours": (BLUE, "-", "o"),
    "by hand": (VERMILION, "--", "s"),
    "plain loop": (VERMILION, "--", "s"),
    "one fused pass": (ORANGE, "-.", "^"),
    "bare products": (GREEN, ":", "v"),
}


def plot_sweeps(timings: list[Timing], path: Path) -> None:
    """Draw one panel a sweep, both axes logarithmic."""
    figure = Figure(figsize=(10, 7.5), layout="constrained")
    for axes, sweep in zip(figure.subplots(2, 2).flat, SWEEPS, strict=True):
        points = [t for t in timings if t.benchmark == sweep]
        for name in dict.fromkeys(t.contender for t in points):
            colour, line, marker = _STYLES[name]
            mine = [t for t in points if t.contender == name]
            axes.loglog(
                [int(t.size) for t in mine],
                [t.least for t in mine],
                color=colour, ls=line, marker=marker, ms=4, lw=1.5, label=name,
            )  # fmt: skip
        values = sorted({int(t.size) for t in points})
        axes.set_xticks(values, [str(v) for v in values])
        low, high = axes.get_ylim()
        steps = (1, 2, 5) if high > 10 * low else (1, 1.2, 1.5, 2, 3, 4, 6, 8)
        marks = [step * 10.0**e for e in range(-3, 3) for step in steps]
        marks = [mark for mark in marks if low <= mark <= high]
        axes.set_yticks(marks, [f"{mark:g}" for mark in marks])
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(NullLocator())
        axes.set_xlabel(_LABELS[sweep])
        axes.set_ylabel("least time of the turns (s)")
        axes.grid(alpha=0.25, lw=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        label_ends(axes)
    figure.suptitle("Cost in seconds, both axes logarithmic: lower is faster", fontsize=11)
    figure.savefig(path, dpi=130)
