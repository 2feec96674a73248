"""Figures, drawn without pyplot so that nothing depends on a display or a global state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from ..estimate.level_bias import LevelCurve
from .model_diagnosis import Row
from .palette import BLUE


def bias_figure(rows: Sequence[Row], curve: LevelCurve, path: str | Path | None = None) -> Figure:
    """Draw the measured bias against context, and against what that context costs.

    Args:
        rows: one per context.
        curve: the measurement, for the title.
        path: where to save the figure; the suffix gives the format.
    """
    figure = Figure(figsize=(8.0, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    known = [row for row in rows if np.isfinite(row.high)]
    bias = np.array([100 * row.bias for row in known])
    spread = np.abs(
        np.array([[100 * row.low, 100 * row.high] for row in known]).reshape(-1, 2).T - bias
    )
    for axes, x in (
        (left, [row.context for row in known]),
        (right, [row.cost for row in known]),
    ):
        axes.errorbar(x, bias, yerr=spread, color=BLUE, marker="o", capsize=3, lw=1.5)
        axes.grid(color="0.9")
    right.margins(x=0.12)
    left.set_xscale("symlog", base=2, linthresh=1)
    left.set_xlim(-0.2, None)
    left.set_ylim(0, None)
    left.set_xlabel("context (steps)")
    left.set_ylabel("gradient missed (%)")
    right.set_xlabel("cost of a window (detach loop = 1)")
    for row, y in zip(known, bias, strict=True):
        if row.context == 0 or row.context >= 8:
            label = "your loop" if row.context == 0 else str(row.context)
            right.annotate(
                label, (row.cost, y), xytext=(5, 4), textcoords="offset points", fontsize=8
            )
    figure.suptitle(
        f"windows of {curve.losses} losses; {curve.samples} losses measured", fontsize=10
    )
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    return figure
