"""Charts of the report as Plotly figures, plain dicts: what runs did over epochs and over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..diagnosis.palette import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from ..train import files
from .curves import (
    Array,
    Curve,
    check_curve,
    epoch_curve,
    estimate_curve,
    numbers,
    truncation_curve,
)
from .read import Run

Figure = dict[str, Any]


# Seven colours, six dashes: the first 42 runs differ in the pair, the first six in each of them.
COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, "#000000", SKY)


DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")


LOSS_UNITS = {
    "copy": "nats per symbol",
    "language": "nats per token",
    "point-process": "nats per event",
}


MARKED = 80  # arbitrary: curves with more points have no markers, which would hide the line


BIAS_AXIS = "relative bias (fraction)"  # of the norm of the gradient; phones cut longer titles


@dataclass(frozen=True)
class Chart:
    """A chart with what it says in words.

    Attributes:
        id: its name in the page.
        title: its heading.
        figure: for Plotly; None where there is nothing to draw, and then `says` tells why.
        says: sentences, one for each run.
    """

    id: str
    title: str
    figure: Figure | None
    says: list[str]


def style(i: int) -> dict[str, Any]:
    """Return colour, dash and marker of the i-th run."""
    colour, symbol = COLOURS[i % len(COLOURS)], SYMBOLS[i % len(SYMBOLS)]
    return {
        "line": {"color": colour, "dash": DASHES[i % len(DASHES)], "width": 2},
        "marker": {"color": colour, "symbol": symbol, "size": 6},
    }


def short(values: Iterable[float]) -> list[float | None]:
    """Return numbers in five digits, null for those that are not finite."""
    return [files.short_number(float(v)) for v in values]


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Return an axis with its title."""
    return {"title": {"text": title, "standoff": 8}, "automargin": True, **more}


def figure(traces: list[Figure], x: dict[str, Any], y: dict[str, Any]) -> Figure:
    """Return a figure in the style of the report."""
    margin = {"l": 60, "r": 12, "t": 12, "b": 50}
    layout = {"xaxis": x, "yaxis": y, "margin": margin, "showlegend": False}
    return {"data": traces, "layout": layout}


def trace(i: int, curve: Curve, name: str, **more: Any) -> Figure:
    """Return a curve of the i-th run; the page chooses between the two x."""
    curve = curve.thinned()
    mode = "lines+markers" if len(curve.y) <= MARKED else "lines"
    meta = {"run": i, "epoch": short(curve.epoch), "time": short(curve.seconds)}
    made = {"type": "scatter", "mode": mode, "name": name, "y": short(curve.y), "meta": meta}
    return {**made, **style(i), **more}


def loss_chart(runs: Sequence[Run]) -> Chart:
    """Training and validation loss."""
    traces, says, seen = [], [], []
    for i, run in enumerate(runs):
        train, valid = epoch_curve(run, "train_loss"), epoch_curve(run, "valid_loss")
        thin = {**style(i)["line"], "width": 1.2}
        traces.append(trace(i, train, _name(runs, run, "training"), mode="lines", line=thin))
        seen += [*train.y, *valid.y]
        sentence = f"{run.name}: training loss from {train.y[0]:.4g} to {train.y[-1]:.4g}"
        if valid.exists:
            traces.append(trace(i, valid, _name(runs, run, "validation")))
            best = int(np.nanargmin(valid.y))
            sentence += f"; lowest validation loss {valid.y[best]:.4g}, epoch {valid.epoch[best]:g}"
        says.append(f"{sentence}.")
    units = {LOSS_UNITS.get(run.config.get("task", ""), "unit of the loss") for run in runs}
    y = axis(f"loss ({', '.join(sorted(units))})", **_scale(np.array(seen)))
    return Chart("loss", "Loss", figure(traces, axis(""), y), says)


def truncation_chart(runs: Sequence[Run]) -> Chart:
    """K in use."""
    traces, says = [], []
    for i, run in enumerate(runs):
        curve = truncation_curve(run)
        steps = {**style(i)["line"], "shape": "hv"}
        traces.append(trace(i, curve, _name(runs, run, "K"), mode="lines", line=steps))
        low, high = curve.y.min(), curve.y.max()
        spread = f"between {low:g} and {high:g}, at the end {curve.y[-1]:g}"
        says.append(f"{run.name}: K {f'fixed at {low:g}' if low == high else spread}.")
    y = axis("K (steps)", rangemode="tozero")
    return Chart("k", "Truncation length K", figure(traces, axis(""), y), says)


def beta_chart(runs: Sequence[Run]) -> Chart:
    """Estimated decay rate."""
    traces, says = [], []
    for i, run in enumerate(runs):
        curve = estimate_curve(run, "beta")
        if curve.exists:
            traces.append(trace(i, curve, _name(runs, run, "beta")))
        says.append(f"{run.name}: {_spread(curve.y, 'beta')}.")
    y = axis("beta (factor per step)")
    return Chart("beta", "Decay rate beta", figure(traces, axis(""), y) if traces else None, says)


def bias_chart(runs: Sequence[Run]) -> Chart:
    """Relative bias: asked, estimated, and measured where it was checked."""
    traces, says, seen = [], [], []
    for i, run in enumerate(runs):
        curve = estimate_curve(run, "relative_bias")
        if curve.exists:
            traces.append(trace(i, curve, _name(runs, run, "estimated bound")))
        if run.delta is not None:
            epoch, seconds = run.epochs[-1]["epoch"], run.epochs[-1]["seconds"]
            ends = Curve(*(np.array(v) for v in ([0.0, epoch], [0.0, seconds], 2 * [run.delta])))
            thin = {"color": style(i)["line"]["color"], "dash": "2px,4px", "width": 2}
            name = _name(runs, run, f"asked: delta = {run.delta:g}")
            traces.append(trace(i, ends, name, mode="lines", line=thin))
        measured = check_curve(run, "measured")
        if measured.exists:
            traces.append(_measured(i, run, measured, _name(runs, run, "measured")))
        seen += [*curve.y, *measured.y, run.delta or np.nan]
        missing = int((~np.isfinite(curve.y)).sum()) if curve.exists else 0
        gap = f"; no bound in {missing} of {len(curve.y)} estimates" if missing else ""
        says.append(f"{run.name}: {_spread(curve.y, 'estimated bound')}{gap}.")
    drawn = figure(traces, axis(""), axis(BIAS_AXIS, **_scale(np.array(seen), zero=True)))
    return Chart("bias", "Relative bias of the gradient", drawn if traces else None, says)


def _measured(i: int, run: Run, curve: Curve, name: str) -> Figure:
    """Return measured biases with their intervals; there are few, so none is left out."""
    low, high = numbers(run.checks, "low"), numbers(run.checks, "high")
    bars = {"array": short(high - curve.y), "arrayminus": short(curve.y - low), "symmetric": False}
    marker = {**style(i)["marker"], "size": 9, "line": {"color": "#000000", "width": 1}}
    made = trace(i, curve, name, mode="markers", marker=marker)
    return {**made, "error_y": {"type": "data", "thickness": 1.5, **bars}}


def _name(runs: Sequence[Run], run: Run, what: str) -> str:
    return what if len(runs) == 1 else f"{run.name}: {what}"


def _spread(values: Array, what: str) -> str:
    seen = values[np.isfinite(values)]
    if not len(seen):
        return f"no {what}, K was not estimated" if not len(values) else f"no {what}"
    return f"{what} between {seen.min():.3g} and {seen.max():.3g}, median {np.median(seen):.3g}"


def _scale(values: Array, zero: bool = False) -> dict[str, Any]:
    """Return a logarithmic scale where a linear one would hide the small values."""
    seen = values[np.isfinite(values)]
    if len(seen) and seen.min() > 0.0 and seen.max() > 20.0 * seen.min():  # 20 is arbitrary
        return {"type": "log", "dtick": 1 if seen.max() > 100.0 * seen.min() else "D2"}
    return {"rangemode": "tozero"} if zero else {}
