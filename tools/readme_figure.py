"""Draw the picture of the README: the recommended loop beside a detach loop, at equal time.

`python tools/readme_figure.py [--out FILE]` reads the cells of the arena
(`benchmarks/results/arena/cells`) and trains nothing. Lines are medians over seeds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

CELLS = Path(__file__).parent.parent / "benchmarks" / "results" / "arena" / "cells"
SEEDS = {10, 11, 12}
PANELS = {  # a task of the arena and what it asks for: two that need memory, one that does not
    "recall": "Recall after 100 steps",
    "runoff": "Runoff of catchments",
    "digits": "Next pixel of a digit",
}
METHODS = {"detach 35": ("0.4", "detach every 35"), "ours": ("#d55e00", "this library")}
# Where each name stands: task, method -> time as a share of the budget, points right and up.
PLACES = {
    ("recall", "detach 35"): (1.0, (0, -14)),
    ("recall", "ours"): (1.0, (0, 26)),
    ("runoff", "detach 35"): (1.0, (0, 26)),
    ("runoff", "ours"): (1.0, (0, -12)),
    ("digits", "detach 35"): (1.0, (0, -14)),
    ("digits", "ours"): (1.0, (0, 9)),
}


def median_curve(task: str, method: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Return processor time, the median validation loss over seeds, and the number of seeds."""
    cells = [json.loads(path.read_text()) for path in sorted(CELLS.glob(f"{task}--*.json"))]
    cells = [c for c in cells if c["method"] == method and c["seed"] in SEEDS]
    rates = {cell["rate"] for cell in cells}
    if len(rates) != 1:
        raise SystemExit(f"expected {task}, {method} at one learning rate, got {sorted(rates)}")
    times = np.linspace(0.0, min(cell["curve"][-1][0] for cell in cells), 31)[1:]
    losses = [np.interp(times, *np.array(cell["curve"])[:, [0, 2]].T) for cell in cells]
    return times, np.median(losses, axis=0), len(cells)


def draw(path: Path) -> None:
    """Draw a panel per task."""
    figure = Figure(figsize=(8.2, 2.7), layout="constrained")
    axes = figure.subplots(1, len(PANELS))
    for panel, (task, title) in zip(axes, PANELS.items(), strict=True):
        lows = []
        for method, (color, label) in METHODS.items():
            times, losses, seeds = median_curve(task, method)
            print(f"{task}, {method}: {losses[-1]:.3g} after {times[-1]:.0f} s, {seeds} seeds")
            panel.plot(times, losses, lw=2.4 if method.startswith("ours") else 1.8, color=color)
            share, shift = PLACES[task, method]
            point = times[at := int(share * (len(times) - 1))], losses[at]
            text = {"textcoords": "offset points", "ha": "right", "color": color}
            panel.annotate(label, point, shift, **text)
            lows.append(losses.min())
            top = losses[1]
        panel.set(title=title, xlim=(0, None), xlabel="processor time in seconds")
        panel.set_ylim(min(lows) - 0.2 * (top - min(lows)), 1.04 * top)
        panel.title.set_fontsize(10.5)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    axes[0].set_ylabel("validation loss")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description="Draw the picture of the README.")
    parser.add_argument("--out", type=Path, default=Path("docs/img/side-by-side.png"))
    draw(parser.parse_args().out)


if __name__ == "__main__":
    main()
