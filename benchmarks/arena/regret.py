"""Regret: a method's time to a target, divided by that of the best fixed setting on the same seed.

The best fixed setting of a task is the one whose loss at half the budget is least, by its median
over seeds; that loss is the target. A method that does not reach it within the budget has the
regret 'never'.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from .cell import LOOKS
from .tasks import HELD_BACK, TASKS, Task

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
OURS = "ours"
Curve = list[list[float]]
Cells = dict[str, dict[str, dict[int, Curve]]]


def read_cells(out: Path, rate_seed: int) -> Cells:
    """Return curves by task, method and seed, without those that chose the learning rate.

    Times are comparable within a heat. Of two heats of a task and a seed the newer one counts.
    """
    held = [json.loads(path.read_text()) for path in sorted((out / "cells").glob("*.json"))]
    held = [cell for cell in held if cell["seed"] != rate_seed]
    newest: dict[tuple[str, int], str] = {}  # a heat's name ends with its date
    for cell in held:
        key = cell["task"], cell["seed"]
        newest[key] = max(newest.get(key, ""), cell.get("heat", ""))
    found: Any = defaultdict(lambda: defaultdict(dict))
    for cell in held:
        if cell.get("heat", "") == newest[cell["task"], cell["seed"]]:
            found[cell["task"]][cell["method"]][cell["seed"]] = cell["curve"]
    return found


def counted(curve: Curve, task: Task) -> Curve:
    """Return what counts of a curve: looks within the budget, losses down to solved."""
    return [[t, n, max(v, task.solved)] for t, n, v in curve[: LOOKS + 1]]


def best_so_far(curve: Curve, smooth: bool = True) -> tuple[list[float], list[float]]:
    """Return times and the lowest loss up to each.

    If smooth, the loss at a look is the median of it and its neighbours: otherwise the lowest of
    many noisy looks would be luck.
    """
    raw = [v if math.isfinite(v) else math.inf for _, _, v in curve]
    if not smooth:
        return [t for t, _, _ in curve], list(np.minimum.accumulate(raw))
    ends = [raw[0], *raw, math.inf]  # the last look has no neighbour to confirm it
    values = [median(ends[i : i + 3]) for i in range(len(raw))]
    return [t for t, _, _ in curve], list(np.minimum.accumulate(values))


def loss_at(curve: Curve, seconds: float) -> float:
    """Return the lowest loss that was seen by some time."""
    times, values = best_so_far(curve)
    return min(v for t, v in zip(times, values, strict=True) if t <= seconds)


def time_to(curve: Curve, target: float, smooth: bool = True) -> float:
    """Return when the loss first was at most the target, between two looks by interpolation."""
    times, values = best_so_far(curve, smooth)
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


def target_of(methods: dict[str, dict[int, Curve]]) -> tuple[str, float]:
    """Return the best fixed setting of a task, and the loss it reaches at half the budget."""
    best = best_fixed(methods)
    return best, median(loss_at(c, c[-1][0] / 2) for c in methods[best].values())


def base_time(curve: Curve, target: float) -> float:
    """Return when the best setting reached the target; the budget where it was unlucky."""
    found = time_to(curve, target)
    return found if math.isfinite(found) else curve[-1][0]


def regrets(cells: Cells) -> dict[str, dict[str, dict[int, float]]]:
    """Return regret by task, method and seed."""
    found: Any = defaultdict(lambda: defaultdict(dict))
    for task, methods in cells.items():
        best, target = target_of(methods)
        for method, curves in methods.items():
            for seed, curve in curves.items():
                if seed in methods[best]:
                    base = base_time(methods[best][seed], target)
                    found[task][method][seed] = time_to(curve, target) / base
    return found


def fresh_lines(cells: Cells, fresh: Cells, ours: str) -> list[str]:
    """Return a table of ours on fresh seeds; `cells` decide on best setting and target."""
    lines = ["| task | best fixed setting | seed | its time | ours | regret |", "|---" * 6 + "|"]
    for task, methods in fresh.items():
        best, target = target_of(cells[task])
        for seed in sorted(set(methods.get(best, {})) & set(methods.get(ours, {}))):
            theirs, mine = (time_to(methods[m][seed], target) for m in (best, ours))
            regret = mine / base_time(methods[best][seed], target)
            times = " | ".join("never" if math.isinf(t) else f"{t:.1f} s" for t in (theirs, mine))
            lines.append(f"| {task} | {best} | {seed} | {times} | {show(regret)} |")
    return lines


def paired_test(a: list[float], b: list[float]) -> float:
    """Return the two-sided p-value of the sign test on pairs; infinite values may be compared."""
    wins = sum(x < y for x, y in zip(a, b, strict=True))
    losses = sum(x > y for x, y in zip(a, b, strict=True))
    n, k = wins + losses, min(wins, losses)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n) if n else 1.0


def show(value: float) -> str:
    """Return a regret as text."""
    return "never" if math.isinf(value) else f"{value:.2f}"


def summary(cells: Cells, ours: str) -> list[dict[str, Any]]:
    """Return a row per method, the smallest worst regret first.

    `faster` counts the pairs of task and seed on which ours took less time to the target, `pairs`
    those on which the two differ, and `p` is the p-value of the sign test.
    """
    found = regrets(cells)
    rows = []
    for method in sorted({m for task in found.values() for m in task}):
        pairs = [
            (task[ours][seed], value)
            for task in found.values()
            for seed, value in task.get(method, {}).items()
            if seed in task.get(ours, {})
        ]
        values = [v for task in found.values() for v in task.get(method, {}).values()]
        per_task = {t: median(task[method].values()) for t, task in found.items() if method in task}
        rows.append(
            {
                "method": method,
                "tasks": per_task,
                "median": median(values),
                "worst": max(values),
                "faster": sum(a < b for a, b in pairs),
                "pairs": sum(a != b for a, b in pairs),
                "p": paired_test(*map(list, zip(*pairs, strict=True))) if pairs else 1.0,
            }
        )
    return sorted(rows, key=lambda row: (row["worst"], row["median"]))


def of_seeds(cells: Cells, seeds: Sequence[int]) -> Cells:
    """Return the cells of some seeds, and only the tasks on which a fixed setting has run."""
    kept = {
        t: {m: {s: c for s, c in curves.items() if s in seeds} for m, curves in methods.items()}
        for t, methods in cells.items()
    }
    kept = {t: {m: curves for m, curves in known.items() if curves} for t, known in kept.items()}
    return {t: methods for t, methods in kept.items() if any(m in FIXED for m in methods)}


def write_table(
    out: Path,
    rate_seed: int,
    ours: str = OURS,
    seeds: Sequence[int] = (10, 11, 12),
    fresh: Sequence[int] = (13, 14),
) -> None:
    """Write `table.md`, `fresh.md` and the figures from the cells there are."""
    from .figures import draw_curves, draw_regrets

    cells = read_cells(out, rate_seed)
    tasks = {**TASKS, **HELD_BACK}
    every = {
        t: {m: {s: counted(c, tasks[t]) for s, c in curves.items()} for m, curves in known.items()}
        for t, known in cells.items()
    }
    cells = of_seeds(every, seeds)
    if not cells:
        print("no cells yet")
        return
    rows = summary(cells, ours)
    lines = [
        "| method | " + " | ".join(cells) + " | median | worst | ours faster |",
        "|---" * (len(cells) + 4) + "|",
    ]
    for row in rows:
        per_task = [show(row["tasks"][t]) if t in row["tasks"] else "" for t in cells]
        name, against = row["method"], f"{row['faster']} of {row['pairs']} (p = {row['p']:.2g})"
        if name == ours:
            name, against = f"**{name}**", ""
        numbers = " | ".join([*per_task, show(row["median"]), show(row["worst"])])
        lines.append(f"| {name} | {numbers} | {against} |")
    best = ", ".join(f"{best_fixed(methods)} on {task}" for task, methods in cells.items())
    text = (
        "Regret: time to the loss that the task's best fixed setting reaches at half the budget, "
        "divided by the time of that setting on the same seed. Per task: the median over seeds "
        f"{', '.join(map(str, seeds))}. Median and worst: over all tasks and seeds. 'never': not "
        f"within the budget. The best fixed settings are {best}. Last column: on how many pairs of "
        "task and seed ours was faster, of those that differ, with the p-value of a sign test."
    )
    (out / "table.md").write_text("\n".join([text, "", *lines]) + "\n")
    print("\n".join(lines))
    later = {t: known for t, known in of_seeds(every, fresh).items() if t in cells}
    (out / "fresh.md").write_text("\n".join(fresh_lines(cells, later, ours)) + "\n")
    draw_curves(cells, out / "curves.png", ours)
    draw_regrets(rows, out / "regret.png", ours)
