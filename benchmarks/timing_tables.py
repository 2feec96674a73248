"""Timings as tables, with the machine they were taken on."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import torch

from adaptive_tbptt.train import origin
from contenders import Timing


def as_markdown(timings: list[Timing]) -> str:
    """Return a table with the ratio of ours to each contender, by minima and by medians."""
    ours = {(t.benchmark, t.size): t for t in timings if t.contender in ("ours", "adaptive")}
    lines = [
        "| benchmark | size | contender | least, s | median, s | tokens / s | ours / it, least | "
        "ours / it, median | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for t in timings:
        our = ours[t.benchmark, t.size]
        speed = f"{t.tokens / t.least:,.0f}" if t.tokens else ""
        lines.append(
            f"| {t.benchmark} | {t.size} | {t.contender} | {t.least:.4f} | {t.median:.4f} | "
            f"{speed} | {our.least / t.least:.2f} | {our.median / t.median:.2f} | "
            f"{t.commit} |"
        )
    return "\n".join(lines)


def machine() -> str:
    """Say where and with what a timing was taken."""
    made = ", ".join(f"{name} {value}" for name, value in origin().items() if name != "commit")
    return f"{made}, {torch.get_num_threads()} threads, denormals flushed for all contenders"


def update_csv(timings: list[Timing], path: Path) -> list[Timing]:
    """Write timings over those of the same benchmark and size; return all the file now holds."""
    kept = read_csv(path) if path.exists() else []
    new = {(t.benchmark, t.size) for t in timings}
    merged = [t for t in kept if (t.benchmark, t.size) not in new] + timings
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in dataclasses.fields(Timing)])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(t) for t in merged)
    return merged


def read_csv(path: Path) -> list[Timing]:
    """Return the timings of a file."""
    with path.open(newline="") as file:
        return [
            Timing(
                row["benchmark"],
                row["size"],
                row["contender"],
                float(row["least"]),
                float(row["median"]),
                int(row["turns"]),
                int(row["tokens"]),
                row.get("commit", ""),
            )
            for row in csv.DictReader(file)
        ]
