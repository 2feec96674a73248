"""How the gradient decays with the lag, at each estimate of a run: a chart with a slider."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .charts import Chart, Figure, axis, figure, name_of, short, style
from .curves import curve_of
from .read import Array, Row, Run

MOST_FRAMES = 60  # of each run; arbitrary: a slider on a phone has few more positions


def decay_chart(runs: Sequence[Run]) -> tuple[Chart, dict[str, Any] | None]:
    """Return the chart at the end of training, and the frames for its slider.

    Frames are `{"runs": [[frame, ...], ...], "positions": [epoch, ...]}`: at a position every run
    shows its last frame up to that epoch. A frame has `epoch`, `says`, and `curves`: x and y of the
    measured norms, of the fitted decay, and of the point at K.
    """
    title = "Decay of the gradient with the lag"
    frames = [_frames(run) for run in runs]
    says = [
        f"{run.name}: {own[-1]['says'] if own else _why_not(run)}."
        for run, own in zip(runs, frames, strict=True)
    ]
    if not any(frames):
        return Chart("decay", title, None, says), None
    traces: list[Figure] = []
    if len(runs) == 1:
        traces.append(_background(frames[0]))
    for i, run in enumerate(runs):
        if frames[i]:
            traces += _traces(i, name_of(runs, run, ""), frames[i][-1])
    positions = sorted({frame["epoch"] for own in frames for frame in own})
    scale = {"type": "log", "exponentformat": "e", "range": _range(frames)}
    drawn = figure(traces, axis("lag k (steps)"), axis("mean gradient norm at lag k", **scale))
    return Chart("decay", title, drawn, says), {"runs": frames, "positions": positions}


def _frames(run: Run) -> list[dict[str, Any]]:
    epochs = curve_of(run, run.estimates, "k").epoch
    whole = {**run.estimates.whole, len(run.estimates) - 1: run.estimates.last}
    rows = [(epochs[i], row) for i, row in whole.items() if "decay" in row]
    return [_frame(*rows[i]) for i in _spread(len(rows), MOST_FRAMES)]


def _frame(epoch: float, row: Row) -> dict[str, Any]:
    lags, phi = (np.array(row["decay"][key], dtype=np.float64) for key in ("lags", "phi"))
    fitted = _fit(row, lags, phi)
    at_k = np.interp(row["k"], lags, phi) if row["k"] <= lags[-1] else np.nan
    curves = [[short(lags), short(phi)], fitted, [[row["k"]], short([float(at_k)])]]
    beta = "no beta" if row["beta"] is None else f"beta = {row['beta']:.4g}"
    says = f"after {epoch:.4g} epochs K = {row['k']}, {beta}"
    return {"epoch": float(f"{epoch:.5g}"), "says": says, "curves": curves}


def _fit(row: Row, lags: Array, phi: Array) -> list[list[float | None]]:
    """Return both ends of the line phi_tau beta^(k - tau)."""
    beta, tau = row["beta"], row.get("tau")
    seen = lags[np.isfinite(phi)]
    if not beta or tau is None or not len(seen) or tau >= seen[-1]:
        return [[], []]
    ends = np.array([tau, seen[-1]])
    # A least-squares line passes through the mean of the points it was fitted to.
    on = np.isfinite(phi) & (lags >= tau)
    level = np.mean(np.log(phi[on]) - np.log(beta) * lags[on])
    return [short(ends), short(np.exp(level + np.log(beta) * ends))]


def _traces(i: int, prefix: str, frame: dict[str, Any]) -> list[Figure]:
    look = style(i)
    thin = {"color": "#000000", "dash": "dot", "width": 1.5}
    big = {**look["marker"], "size": 12, "line": {"color": "#000000", "width": 1.5}}
    parts: list[Figure] = [
        {"name": f"{prefix}measured", "mode": "lines", "line": look["line"]},
        {"name": f"{prefix}fitted beta", "mode": "lines", "line": thin},
        {"name": f"{prefix}at K", "mode": "markers", "marker": big},
    ]
    return [
        {"type": "scatter", "x": x, "y": y, "meta": {"run": i, "part": part}, **drawn}
        for part, (drawn, (x, y)) in enumerate(zip(parts, frame["curves"], strict=True))
    ]


def _background(frames: list[dict[str, Any]]) -> Figure:
    """Return up to eight measured curves as one gray trace, so that print shows the movement."""
    x: list[float | None] = []
    y: list[float | None] = []
    for i in _spread(len(frames), 8):
        lags, phi = frames[i]["curves"][0]
        x += [*lags, None]
        y += [*phi, None]
    line = {"color": "#999999", "width": 0.8}
    name = "other estimates"
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "name": name, "line": line,
            "hoverinfo": "skip"}  # fmt: skip


def _spread(count: int, most: int) -> list[int]:
    """Return up to `most` evenly spaced indices."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(most, count)).tolist()})


def _range(frames: list[list[dict[str, Any]]]) -> list[float]:
    """Return one range for all frames, in powers of ten, so that the slider does not move it."""
    values = [v for own in frames for frame in own for v in frame["curves"][0][1] if v is not None]
    if not values:
        return [-1.0, 1.0]
    low, high = np.log10(min(values)), np.log10(max(values))
    edge = max(0.05 * (high - low), 0.1)
    return [round(low - edge, 3), round(high + edge, 3)]


def _why_not(run: Run) -> str:
    if len(run.probes):
        return "the release that recorded it kept no decay curves"
    return "K was fixed, so no decay was measured; atbptt diagnose measures it"
