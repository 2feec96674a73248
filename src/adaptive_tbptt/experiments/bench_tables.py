"""Timings as tables, with the machine they were taken on."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import torch

from .bench import Timing
from .cells import origin


def as_markdown(timings: list[Timing]) -> str:
    """Return a table with the ratio of ours to each contender, by minima and by medians."""
    ours = {(t.benchmark, t.size): t for t in timings if t.contender in ("ours", "adaptive")}
    lines = [
        "| benchmark | size | contender | least, s | median, s | tokens / s | ours / it, least | "
        "ours / it, median |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for t in timings:
        our = ours[t.benchmark, t.size]
        speed = f"{t.tokens / t.least:,.0f}" if t.tokens else ""
        lines.append(
            f"| {t.benchmark} | {t.size} | {t.contender} | {t.least:.4f} | {t.median:.4f} | "
            f"{speed} | {our.least / t.least:.2f} | {our.median / t.median:.2f} |"
        )
    return "\n".join(lines)


def machine() -> str:
    """Say where and with what a timing was taken."""
    made = ", ".join(f"{name} {value}" for name, value in origin().items())
    return f"{made}, {torch.get_num_threads()} threads, denormals flushed for all contenders"


def write_csv(timings: list[Timing], path: Path) -> None:
    """Write every timing."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in dataclasses.fields(Timing)])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(t) for t in timings)
