"""Pictures of the arena: validation curves against time, and the regret of every method."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

# Fixed settings that a person would try, and ours; more lines could not be told apart.
SHOWN = {
    "detach 10": ("0.7", "detach 10"),
    "detach 35": ("0.35", "detach 35"),
    "detach 140": ("#56b4e9", "detach 140"),
    "context 10": ("#cc79a7", "10 losses, context 10"),
    "context 140": ("#009e73", "140 losses, context 140"),
}
ORANGE = "#d55e00"


def draw_curves(cells: Any, path: Path, ours: str) -> None:
    """Draw the median validation loss against processor time, one panel per task."""
    from matplotlib.figure import Figure

    count = len(cells)
    figure = Figure(figsize=(4.0 * min(count, 3), 3.1 * math.ceil(count / 3)), layout="constrained")
    axes = figure.subplots(math.ceil(count / 3), min(count, 3), squeeze=False).flatten()
    for panel, (task, methods) in zip(axes, cells.items(), strict=False):
        for method, (color, label) in {**SHOWN, ours: (ORANGE, "ours")}.items():
            if method not in methods:
                continue
            curves = methods[method]
            times = np.linspace(0.0, min(c[-1][0] for c in curves.values()), 31)[1:]
            values = [np.interp(times, *np.array(c)[:, [0, 2]].T) for c in curves.values()]
            width = 2.4 if method == ours else 1.2
            panel.plot(times, np.median(values, 0), lw=width, color=color, label=label)
        low = min(min(v for _, _, v in c) for m in methods.values() for c in m.values())
        high = max(c[2][2] for m, found in methods.items() if m in SHOWN for c in found.values())
        panel.set(title=task, ylim=(low - 0.05 * (high - low), high), xlim=(0, None))
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    for panel in axes[count:]:
        panel.set_visible(False)
    known = {
        label: line
        for panel in axes
        for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(known.values(), known.keys(), loc="outside upper center", ncols=6, frameon=False)
    figure.supxlabel("processor time in seconds")
    figure.supylabel("validation loss, median over seeds")
    figure.savefig(path, dpi=150)


def draw_regrets(rows: list[dict[str, Any]], path: Path, ours: str) -> None:
    """Draw a dot per task for every method; 'never' stands at the right edge."""
    from matplotlib.figure import Figure

    known = [v for row in rows for v in row["tasks"].values() if math.isfinite(v)]
    edge = 1.35 * max(known)
    figure = Figure(figsize=(7.2, 0.34 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    for i, row in enumerate(reversed(rows)):
        color = ORANGE if row["method"] == ours else "0.35"
        values = [v if math.isfinite(v) else edge for v in row["tasks"].values()]
        # Dots at the same place are spread a little, so that they can be counted.
        seen: dict[float, int] = {}
        for value in values:
            place = round(math.log(value), 1)
            seen[place] = seen.get(place, 0) + 1
            axes.plot(value, i + 0.13 * (seen[place] - 1), "o", color=color, ms=5, alpha=0.8)
    axes.axvline(1.0, color="0.6", lw=1, ls=":")
    axes.set_xscale("log")
    ticks = [t for t in (0.25, 0.5, 1, 2, 4, 8) if min(known) / 1.2 <= t < edge]
    axes.set_xticks([*ticks, edge], [*(f"{t:g}" for t in ticks), "never"])
    axes.minorticks_off()
    axes.set_yticks(range(len(rows)), [row["method"] for row in reversed(rows)])
    axes.set(
        xlabel="time to the target, relative to the best fixed setting of the task",
        title="Every dot is a task: the median over seeds",
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)
