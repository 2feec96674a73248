"""Figures of two panels, as `diagnose` and `lookback` draw them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from .palette import BLUE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def two_panels(**options: Any) -> tuple[Figure, Axes, Axes]:
    """Return a figure and its two axes; options go to `subplots`."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(8.0, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, **options)
    for axes in (left, right):
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
    return figure, left, right


def draw_intervals(axes: Axes, x: ArrayLike, y: ArrayLike, low: ArrayLike, high: ArrayLike) -> None:
    """Draw a curve with its intervals."""
    values, limits = np.asarray(y), np.stack([np.asarray(low), np.asarray(high)])
    spread = np.abs(limits - values)
    axes.errorbar(
        np.asarray(x), values, yerr=spread, color=BLUE, marker="o", ms=4, capsize=3, lw=1.5
    )


def name_line(axes: Axes, height: float, name: str) -> None:
    """Write a name above the left end of a level line."""
    axes.annotate(
        name, (0.02, height), (0, 3),
        axes.get_yaxis_transform(), "offset points",
        va="bottom", color="0.3", fontsize=9,
    )  # fmt: skip


def save(figure: Figure, title: str, path: str | Path | None) -> Figure:
    """Set the title of a figure; save it if there is a path."""
    figure.suptitle(title, fontsize=10)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    return figure
