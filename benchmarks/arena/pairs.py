"""Two methods seed by seed: the ratio of their times to a target."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean, median, stdev

from adaptive_tbptt.estimate.unbiased_norms import student_quantile

from .regret import loss_at, read_cells, show, time_to


def compare(
    out: Path, task: str, ours: str, other: str, target: float | None, rate_seed: int
) -> list[str]:
    """Return a table of both times on every seed that both have, and the mean ratio.

    Args:
        out: folder of the cells.
        task: of both.
        ours: the first method.
        other: the second one.
        target: loss to reach; None is the median of what `other` reaches at half the budget.
        rate_seed: the seed that does not count.
    """
    methods = read_cells(out, rate_seed)[task]
    seeds = sorted(set(methods[ours]) & set(methods[other]))
    smooth = target is None  # a run that ends at its target has no look after it
    if target is None:
        target = median(loss_at(c, c[-1][0] / 2) for c in methods[other].values())
    lines = [f"| seed | {ours} | {other} | ratio |", "|---|---|---|---|"]
    ratios = []
    for seed in seeds:
        a, b = (time_to(methods[m][seed], target, smooth) for m in (ours, other))
        ratio = show(a / b) if math.isfinite(a) and math.isfinite(b) else ""
        lines.append(f"| {seed} | {show(a)} | {show(b)} | {ratio} |")
        if math.isfinite(a) and math.isfinite(b):
            ratios.append(math.log(a / b))
    text = f"Processor seconds to a validation loss of {target:.4g} on {task}."
    if len(ratios) > 1:
        middle = fmean(ratios)
        # student_quantile counts groups: one degree of freedom less than pairs.
        width = student_quantile(0.975, len(ratios)) * stdev(ratios) / math.sqrt(len(ratios))
        text += (
            f" Geometric mean of the ratio over {len(ratios)} seeds that both reach it on: "
            f"{math.exp(middle):.2f} [{math.exp(middle - width):.2f}, "
            f"{math.exp(middle + width):.2f}] (95 %)."
        )
    return [text, "", *lines]
