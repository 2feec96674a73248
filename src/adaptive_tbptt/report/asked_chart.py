"""The bias that you asked for against the estimated and the measured bias, a line for each run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .charts import BIAS_AXIS, EDGE, Chart, Figure, axis, error_bars, figure, finite, short, style
from .curves import Curve, curve_of
from .read import Array, Run


def asked_chart(runs: Sequence[Run]) -> Chart:
    """Return the chart: delta, each estimate and their median, and the measured bias."""
    traces: list[Figure] = []
    drawn: list[Run] = []
    says = []
    for i, run in enumerate(runs):
        estimated = curve_of(run, run.estimates, "relative_bias")
        measured = curve_of(run, run.checks, "measured")
        if estimated.exists or measured.exists:
            traces += _row(i, len(drawn), run, estimated, measured)
            drawn.append(run)
        says.append(f"{run.name}: {_verdict(run, estimated.y, measured.y)}.")
    title = "Relative bias of each run"
    if not drawn:
        return Chart("asked", title, None, says)
    ticks = {"tickvals": list(range(len(drawn))), "ticktext": [_wrapped(run.name) for run in drawn]}
    y = axis("run", range=[len(drawn) - 0.5, -0.5], zeroline=False, showgrid=False, **ticks)
    made = figure(traces, axis(BIAS_AXIS, rangemode="tozero"), y)
    made["layout"]["height"] = 120 + 70 * len(drawn)  # pixels; arbitrary: rows of equal height
    return Chart("asked", title, made, says)


def _row(i: int, row: int, run: Run, estimated: Curve, measured: Curve) -> list[Figure]:
    """Return the traces of one line: estimates above it, measured values below it."""
    colour, symbol = style(i)["marker"]["color"], style(i)["marker"]["symbol"]
    traces: list[Figure] = []
    above = row - 0.15 if measured.exists else row
    if estimated.exists:
        seen = finite(estimated.thinned().y)
        dots = {"color": colour, "symbol": f"{symbol}-open", "size": 8, "opacity": 0.6}
        traces.append(_points(i, "estimated bounds", seen, above, marker=dots))
        middle = np.array([np.nanmedian(estimated.y)])
        big = {"color": colour, "symbol": symbol, "size": 14, "line": EDGE}
        traces.append(_points(i, "their median", middle, above, marker=big))
    if measured.exists:
        mark = {"color": "#FFFFFF", "symbol": "star", "size": 11, "line": EDGE}
        made = _points(i, "measured, with interval", measured.y, row + 0.15, marker=mark)
        made["error_x"] = {"color": "#000000", **error_bars(run)}
        traces.append(made)
    if run.delta is not None:
        mark = {"symbol": "line-ns-open", "size": 44, "color": "#000000", "line": {"width": 3}}
        traces.append(_points(i, "asked: delta", np.array([run.delta]), row, marker=mark))
    return traces


def _points(i: int, name: str, x: Array, y: float, **more: object) -> Figure:
    at = {"x": short(x), "y": [y] * len(x)}
    return {"type": "scatter", "mode": "markers", "name": name, "meta": {"run": i}, **at, **more}


def _verdict(run: Run, estimated: Array, measured: Array) -> str:
    """Say how often the bias was at most delta."""
    parts = []
    for what, values in (("estimates", estimated), ("measurements", measured)):
        if not len(values):
            continue
        seen = finite(values)
        middle = f"median {np.median(seen):.3g}" if len(seen) else "none with a bound"
        if run.delta is None or run.guessed:
            parts.append(f"{len(values)} {what}, {middle}")
        else:
            kept = int((values <= run.delta).sum())  # NaN stands for an infinite bound: not kept
            parts.append(f"{kept} of {len(values)} {what} at most delta, {middle}")
    if run.guessed:
        asked = "K is the best guess"
    elif run.delta is not None:
        asked = f"asked {run.delta:g}"
    else:
        asked = f"K fixed at {run.epochs.last['k']}"
    return f"{asked}; {'; '.join(parts) or 'the bias was not estimated'}"


def _wrapped(name: str, width: int = 16) -> str:
    return "<br>".join(name[i : i + width] for i in range(0, len(name), width))
