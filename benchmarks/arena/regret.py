"""Regret: a method's time to a target, divided by that of the best fixed setting on the same seed.

The best fixed setting of a task is the one whose loss at half the budget is least, by its median
over seeds; that loss is the target. A method that does not reach it within the budget has the
regret 'never'.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

FIXED = (
    "detach 10",
    "detach 20",
    "detach 35",
    "detach 140",
    "context 10",
    "context 35",
    "context 140",
    "full",
)
Curve = list[list[float]]
Cells = dict[str, dict[str, dict[int, Curve]]]


def read_cells(out: Path, rate_seed: int) -> Cells:
    """Return curves by task, method and seed, without those that chose the learning rate."""
    found: Any = defaultdict(lambda: defaultdict(dict))
    for path in sorted((out / "cells").glob("*.json")):
        cell = json.loads(path.read_text())
        if cell["seed"] != rate_seed:
            found[cell["task"]][cell["method"]][cell["seed"]] = cell["curve"]
    return found


def best_so_far(curve: Curve) -> tuple[list[float], list[float]]:
    """Return times and the lowest loss up to each."""
    values = [v if math.isfinite(v) else math.inf for _, _, v in curve]
    return [t for t, _, _ in curve], list(np.minimum.accumulate(values))


def loss_at(curve: Curve, seconds: float) -> float:
    """Return the lowest loss that was seen by some time."""
    times, values = best_so_far(curve)
    return min(v for t, v in zip(times, values, strict=True) if t <= seconds)


def time_to(curve: Curve, target: float) -> float:
    """Return when the loss first was at most the target, between two looks by interpolation."""
    times, values = best_so_far(curve)
    for i, value in enumerate(values):
        if value <= target:
            if i == 0:
                return times[0]
            share = (values[i - 1] - target) / (values[i - 1] - value)
            return times[i - 1] + share * (times[i] - times[i - 1])
    return math.inf


def best_fixed(methods: dict[str, dict[int, Curve]]) -> str:
    """Return the fixed setting whose loss at half the budget is least, by its median."""

    def at_half(name: str) -> float:
        return median(loss_at(c, c[-1][0] / 2) for c in methods[name].values())

    return min((name for name in FIXED if name in methods), key=at_half)


def regrets(cells: Cells) -> dict[str, dict[str, dict[int, float]]]:
    """Return regret by task, method and seed."""
    found: Any = defaultdict(lambda: defaultdict(dict))
    for task, methods in cells.items():
        best = best_fixed(methods)
        target = median(loss_at(c, c[-1][0] / 2) for c in methods[best].values())
        for method, curves in methods.items():
            for seed, curve in curves.items():
                base = time_to(methods[best][seed], target)
                if not math.isfinite(base):  # the best setting was unlucky on this seed
                    base = methods[best][seed][-1][0]
                found[task][method][seed] = time_to(curve, target) / base
    return found


def paired_test(a: list[float], b: list[float]) -> float:
    """Return the two-sided p-value of the sign test on pairs; infinite values may be compared."""
    wins = sum(x < y for x, y in zip(a, b, strict=True))
    losses = sum(x > y for x, y in zip(a, b, strict=True))
    n, k = wins + losses, min(wins, losses)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n) if n else 1.0


def show(value: float) -> str:
    """Return a regret as text."""
    return "never" if math.isinf(value) else f"{value:.2f}"


def write_table(out: Path, rate_seed: int) -> None:
    """Write `table.md` and `curves.png` from the cells there are."""
    cells = read_cells(out, rate_seed)
    if not cells:
        print("no cells yet")
        return
    found = regrets(cells)
    tasks = list(found)
    methods = sorted({m for task in tasks for m in found[task]})
    rows = []
    for method in methods:
        values = [v for task in tasks for v in found[task].get(method, {}).values()]
        per_task = [
            median(found[t][method].values()) if method in found[t] else None for t in tasks
        ]
        rows.append((max(values), median(values), method, per_task))
    lines = [
        "| method | " + " | ".join(tasks) + " | median | worst |",
        "|---" * (len(tasks) + 3) + "|",
    ]
    for worst, middle, method, per_task in sorted(rows, key=lambda r: (r[0], r[1])):
        cells_text = ["" if v is None else show(v) for v in per_task]
        lines.append(f"| {method} | {' | '.join(cells_text)} | {show(middle)} | {show(worst)} |")
    best = ", ".join(f"{task}: {best_fixed(cells[task])}" for task in tasks)
    seeds = sorted({s for t in tasks for m in found[t] for s in found[t][m]})
    text = (
        "Regret: time to the loss that the task's best fixed setting reaches at half the budget, "
        f"relative to that setting on the same seed. Median over seeds {seeds} per task; median "
        f"and worst over all tasks and seeds. Best fixed setting: {best}."
    )
    (out / "table.md").write_text("\n".join([text, "", *lines]) + "\n")
    print("\n".join(lines))
    draw(cells, out / "curves.png")


def draw(cells: Cells, path: Path) -> None:
    """Draw the median validation loss against processor time, one panel per task."""
    from matplotlib.figure import Figure

    count = len(cells)
    figure = Figure(figsize=(4.2 * min(count, 3), 3.4 * math.ceil(count / 3)), layout="constrained")
    axes = figure.subplots(math.ceil(count / 3), min(count, 3), squeeze=False).flatten()
    for panel, (task, methods) in zip(axes, cells.items(), strict=False):
        for method, curves in methods.items():
            looks = min(len(c) for c in curves.values())
            times = [median(c[i][0] for c in curves.values()) for i in range(looks)]
            values = [median(c[i][2] for c in curves.values()) for i in range(looks)]
            ours = method == OURS
            panel.plot(
                times[1:],
                values[1:],
                lw=2.4 if ours else 1.0,
                color="#d55e00" if ours else None,
                label=method,
            )
        panel.set(title=task, xlabel="processor seconds", ylabel="validation loss")
    axes[0].legend(fontsize="x-small")
    figure.savefig(path, dpi=150)


OURS = "ours, 20"
