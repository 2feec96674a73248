"""Pictures of the arena: validation curves against time, and the regret of every method."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from adaptive_tbptt.diagnosis.palette import BLUE
from atbptt_paper.labels import label_ends

from .regret import best_fixed

# Beside ours, the task's best fixed setting and the detach loop that most people have: context, in
# grey. More lines could not be told apart.
USUAL = "detach 35"
CONTEXT = ("detach 10", "detach 140", "context 140", "context 10", "detach 20", "context 35")
MOST = 6
ORANGE = "#d55e00"


def shown(methods: Any, ours: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the methods of a task that are drawn, each with its name and style; ours last."""
    best = best_fixed(methods)
    told: dict[str, tuple[str, dict[str, Any]]] = {
        USUAL: (USUAL, {"color": "0.2", "lw": 1.4, "ls": "--"}),
        best: (f"{best}, best fixed", {"color": BLUE, "lw": 1.6}),
        ours: ("ours", {"color": ORANGE, "lw": 2.4}),
    }
    told = {method: look for method, look in told.items() if method in methods}
    others = [method for method in CONTEXT if method in methods and method not in told]
    grey = {"color": "0.6", "lw": 0.9}
    return {method: (method, grey) for method in others[: MOST - len(told)]} | told


def draw_curves(cells: Any, path: Path, ours: str) -> None:
    """Draw the median validation loss against processor time, one panel per task."""
    from matplotlib.figure import Figure

    count = len(cells)
    columns = min(count, 2)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(4.9 * columns, 0.8 + 2.7 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, (task, methods) in zip(axes, cells.items(), strict=False):
        told = shown(methods, ours)
        for method, (label, style) in told.items():
            curves = methods[method]
            times = np.linspace(0.0, min(c[-1][0] for c in curves.values()), 31)[1:]
            values = [np.interp(times, *np.array(c)[:, [0, 2]].T) for c in curves.values()]
            panel.plot(times, np.median(values, 0), label=label, **style)
        low = min(min(v for _, _, v in c) for m in told for c in methods[m].values())
        high = max(c[2][2] for m in told for c in methods[m].values())
        panel.set(title=task, ylim=(low - 0.05 * (high - low), high), xlim=(0, None))
        panel.spines[["top", "right"]].set_visible(False)
    for panel in axes[count:]:
        panel.set_visible(False)
    figure.supxlabel("processor time in seconds")
    figure.supylabel("validation loss, median over seeds")
    figure.suptitle("Ours beside the best fixed setting of every task; grey: other fixed settings")
    for panel in axes[:count]:
        label_ends(panel)
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
    ticks = [t for t in (0.25, 0.5, 1, 2, 4, 8) if min(known) / 1.2 <= t < edge / 1.2]
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
