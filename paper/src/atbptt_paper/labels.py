"""Names of curves written beside the curves, not into a legend; and an axis without the start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D


def label_ends(
    axes: Axes, lines: Mapping[str, Line2D] | None = None, size: float = 9.0
) -> list[str]:
    """Write the name of every line at the right of the axes, tied to the line's last point.

    Names are moved apart as little as needed not to overlap. Call it when the limits are set.

    Args:
        axes: where the lines are.
        lines: by name; None takes all that have a label of their own.
        size: of the text, in points.

    Returns:
        The names, from bottom to top.
    """
    if lines is None:
        named = {str(line.get_label()): line for line in axes.get_lines()}
        lines = {name: line for name, line in named.items() if not name.startswith("_")}
    ends = {}
    for name, line in lines.items():
        x, y = (np.asarray(values, dtype=float) for values in line.get_data())
        seen = np.flatnonzero(np.isfinite(y))
        if len(seen):
            low, high = sorted(axes.get_ylim())
            inside = min(max(float(y[seen[-1]]), low), high)
            level = not line.get_transform().contains_branch(axes.transData)  # axhline: x in 0..1
            ends[name] = (axes.get_xlim()[1] if level else x[seen[-1]], inside)
    order = sorted(ends, key=lambda name: _height(axes, *ends[name]))
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # lays out, so that heights are known
    rows = max((name.count("\n") + 1 for name in order), default=1)
    gap = 1.3 * rows * size / 72.0 * figure.dpi / axes.get_window_extent().height
    heights = spread([_height(axes, *ends[name]) for name in order], gap)
    for name, height in zip(order, heights, strict=True):
        colour = lines[name].get_color()
        axes.annotate(
            name, ends[name], (1.05, height), "data", "axes fraction",
            color=colour, fontsize=size, va="center", annotation_clip=False, parse_math=False,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.7, "alpha": 0.7,
                        "shrinkA": 1.0, "shrinkB": 1.0, "relpos": (0.0, 0.5)},
        )  # fmt: skip
    return order


def spread(heights: list[float], gap: float) -> np.ndarray:
    """Return ascending numbers moved apart to at least `gap`, each group around its own mean.

    They stay between 0 and 1 as long as there is room.

    >>> spread([0.1, 0.5, 0.5, 0.9], 0.2).round(2).tolist()
    [0.1, 0.4, 0.6, 0.9]
    """
    groups: list[list[float]] = []  # least-squares steps of heights less their share of the gaps
    for i, height in enumerate(heights):
        groups.append([height - i * gap])
        while len(groups) > 1 and np.mean(groups[-2]) >= np.mean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    means = np.array([np.mean(group) for group in groups for _ in group])
    steps = np.clip(means, 0.0, max(0.0, 1.0 - gap * (len(heights) - 1)))
    return steps + gap * np.arange(len(heights))


def leave_out_the_start(axes: Axes, most: float = np.inf) -> bool:
    """Fit the y axis to what comes after the first tenth of every curve; tell whether it cuts.

    Args:
        axes: with curves of any lengths.
        most: the axis ends at so many times its lowest value, however large the curves become.
    """
    curves = [np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()]
    curves = [y[np.isfinite(y)] for y in curves]
    later = [y[len(y) // 10 + 1 if len(y) > 10 else len(y) // 4 :] for y in curves]
    if not any(len(y) for y in later):
        return False
    low = min(y.min() for y in later if len(y))
    high = min(max(y.max() for y in later if len(y)), most * low if low > 0 else np.inf)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(min(min(y.min() for y in curves if len(y)), low) - room, high + room)
    return max(y.max() for y in curves if len(y)) > high + room


def _height(axes: Axes, x: float, y: float) -> float:
    """Return where a point lies between the lower (0) and the upper (1) edge of the axes."""
    return float(axes.transLimits.transform(axes.transScale.transform((x, y)))[1])
