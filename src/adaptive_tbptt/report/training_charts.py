"""What runs did over epochs and over time: loss, K, decay rate, bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .charts import (
    BIAS_AXIS,
    EDGE,
    Chart,
    axis,
    error_bars,
    figure,
    finite,
    name_of,
    style,
    trace,
)
from .curves import Curve, curve_of, truncation_curve
from .read import Array, Run

LOSS_UNITS = {
    "copy": "nats per symbol",
    "language": "nats per token",
    "point-process": "nats per event",
}


def loss_chart(runs: Sequence[Run]) -> Chart:
    """Training and validation loss."""
    traces, says, seen = [], [], []
    for i, run in enumerate(runs):
        train, valid = (curve_of(run, run.epochs, key) for key in ("train_loss", "valid_loss"))
        thin = {**style(i)["line"], "width": 1.2}
        traces.append(trace(i, train, name_of(runs, run, "training"), mode="lines", line=thin))
        seen += [train.y, valid.y]
        sentence = f"{run.name}: training loss from {train.y[0]:.4g} to {train.y[-1]:.4g}"
        if valid.exists:
            traces.append(trace(i, valid, name_of(runs, run, "validation")))
            best = int(np.nanargmin(valid.y))
            sentence += f"; lowest validation loss {valid.y[best]:.4g}, epoch {valid.epoch[best]:g}"
        says.append(f"{sentence}.")
    units = {LOSS_UNITS.get(run.config.get("task", ""), "unit of the loss") for run in runs}
    y = axis(f"loss ({', '.join(sorted(units))})", **_scale(np.concatenate(seen)))
    return Chart("loss", "Loss", figure(traces, axis(""), y), says)


def truncation_chart(runs: Sequence[Run]) -> Chart:
    """K in use."""
    traces, says = [], []
    for i, run in enumerate(runs):
        curve = truncation_curve(run)
        steps = {**style(i)["line"], "shape": "hv"}
        traces.append(trace(i, curve, name_of(runs, run, "K"), mode="lines", line=steps))
        low, high = curve.y.min(), curve.y.max()
        spread = f"between {low:g} and {high:g}, at the end {curve.y[-1]:g}"
        says.append(f"{run.name}: K {f'fixed at {low:g}' if low == high else spread}.")
    y = axis("K (steps)", rangemode="tozero")
    return Chart("k", "Truncation length K", figure(traces, axis(""), y), says)


def beta_chart(runs: Sequence[Run]) -> Chart:
    """Estimated decay rate."""
    traces, says = [], []
    for i, run in enumerate(runs):
        curve = curve_of(run, run.estimates, "beta")
        if curve.exists:
            traces.append(trace(i, curve, name_of(runs, run, "beta")))
        says.append(f"{run.name}: {_spread(curve.y, 'beta')}.")
    y = axis("beta (factor per step)")
    return Chart("beta", "Decay rate beta", figure(traces, axis(""), y) if traces else None, says)


def bias_chart(runs: Sequence[Run]) -> Chart:
    """Relative bias: asked, estimated, and measured where it was checked."""
    traces, says, seen = [], [], []
    for i, run in enumerate(runs):
        curve = curve_of(run, run.estimates, "relative_bias")
        if curve.exists:
            traces.append(trace(i, curve, name_of(runs, run, "estimated bound")))
        if run.delta is not None:
            epoch, seconds = run.epochs.last["epoch"], run.epochs.last["seconds"]
            ends = Curve(*(np.array(v) for v in ([0.0, epoch], [0.0, seconds], 2 * [run.delta])))
            thin = {"color": style(i)["line"]["color"], "dash": "2px,4px", "width": 2}
            name = name_of(runs, run, f"asked: delta = {run.delta:g}")
            traces.append(trace(i, ends, name, mode="lines", line=thin))
        measured = curve_of(run, run.checks, "measured")
        if measured.exists:
            marker = {**style(i)["marker"], "size": 9, "line": EDGE}
            name = name_of(runs, run, "measured")
            bars = {"thickness": 1.5, **error_bars(run)}
            traces.append(trace(i, measured, name, mode="markers", marker=marker, error_y=bars))
        seen += [curve.y, measured.y, np.array([run.delta or np.nan])]
        missing = len(curve.y) - len(finite(curve.y)) if curve.exists else 0
        gap = f"; no bound in {missing} of {len(curve.y)} estimates" if missing else ""
        says.append(f"{run.name}: {_spread(curve.y, 'estimated bound')}{gap}.")
    drawn = figure(traces, axis(""), axis(BIAS_AXIS, **_scale(np.concatenate(seen), zero=True)))
    return Chart("bias", "Relative bias of the gradient", drawn if traces else None, says)


def _spread(values: Array, what: str) -> str:
    seen = finite(values)
    if not len(seen):
        return f"no {what}, K was not estimated" if not len(values) else f"no {what}"
    return f"{what} between {seen.min():.3g} and {seen.max():.3g}, median {np.median(seen):.3g}"


def _scale(values: Array, zero: bool = False) -> dict[str, Any]:
    """Return a logarithmic scale where a linear one would hide the small values."""
    seen = finite(values)
    if len(seen) and seen.min() > 0.0 and seen.max() > 20.0 * seen.min():  # 20 is arbitrary
        return {"type": "log", "dtick": 1 if seen.max() > 100.0 * seen.min() else "D2"}
    return {"rangemode": "tozero"} if zero else {}
