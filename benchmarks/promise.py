"""Does each gauge keep delta? Asked against true relative bias along a whole copy run.

Trains the paper's copy model once at a fixed K and keeps the parameters of some epochs. At each of
them the true curve is measured by plain autograd on many losses (`benchmarks/truth`), and every
gauge chooses K as it would in training, several times. Goes on where it stopped.

    python -m benchmarks.promise --data FILE.npz --out paper/results/promise
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import adaptive_tbptt as at
from adaptive_tbptt.diagnosis.palette import BLUE, VERMILION
from atbptt_paper.experiments.run import make_optimizer
from atbptt_paper.labels import label_ends
from atbptt_paper.tasks.copy_task import PRESETS, CopyConfig

from .truth.brute_force import true_bias
from .truth.models import Case

EPOCHS = [0, 1, 3, 5, *range(10, 61, 10), *range(80, 201, 20), 210]
DELTAS = (0.5, 0.1)
LEAST = 0.01  # a tenth of the least delta: points of a smaller true bias lie at the edge

TRUE_WINDOWS = 240  # of every row: 15,360 losses
TRUE_KS = [0, 1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 64]
# As in training once earlier estimates add to a new one; a snapshot has none, so all are fresh.
BUDGET = at.truncate.ProbeBudget(first=32)
GAUGES: dict[str, at.truncate.Gauge] = {
    "printed": at.truncate.PaperGauge(tau=0.8),
    "release": at.truncate.ReleaseGauge(tau=0.8),
    "measured": at.truncate.MeasuredGauge(budget=BUDGET),
}


def train(config: CopyConfig, folder: Path) -> None:
    """Train once and keep the parameters of the epochs that are looked at."""
    if (folder / f"{EPOCHS[-1]}.pt").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    streams, model = config.streams(), config.model()
    torch.save(model.state_dict(), folder / "0.pt")

    def keep(trainer: at.Trainer, metrics: dict[str, Any]) -> None:
        if metrics["epoch"] in EPOCHS:
            torch.save(trainer.model.state_dict(), folder / f"{metrics['epoch']}.pt")

    at.Trainer(
        at.AdaptiveTBPTT(model, config.loss_fn, config.controller(), seed=config.seed),
        make_optimizer(config, model),
        run_dir=folder / "run",
        step_scale="sqrt",
        clip=config.make_clip(),
        callbacks=[keep],
        tensorboard=False,
    ).fit(streams["train"], streams["valid"], epochs=EPOCHS[-1], resume=True)


def truth(model: Any, config: CopyConfig, stream: at.SequenceStream) -> list[dict[str, float]]:
    """Measure the relative bias of single losses at every K of the grid, by plain autograd."""
    whole = stream.segment(0, len(stream))
    case = Case(lambda: model, lambda: None, config.loss_fn, losses=1)
    bias, error = true_bias(
        case,
        _Plain(model),
        (whole.inputs, whole.targets, None),
        [*TRUE_KS, config.lags],
        config.burn_in,
        TRUE_WINDOWS,
    )
    samples = TRUE_WINDOWS * stream.rows
    return [
        {"k": k, "relative": b, "low": b - 2 * e, "high": b + 2 * e, "samples": samples}
        for k, b, e in zip(TRUE_KS, bias, error, strict=True)
    ]


class _Plain(torch.nn.Module):
    """The model as brute force calls it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any, state: Any) -> Any:
        features, state = self.model.core(x, state)
        return self.model.head(features), state


def choices(
    model: Any, config: CopyConfig, stream: at.SequenceStream, repeats: int
) -> list[dict[str, Any]]:
    """Let every gauge choose K, `repeats` times, each on segments of its own."""
    found = []
    objective = at.model.Objective.of(model, config.loss_fn)
    for repeat in range(repeats):
        for name, gauge in GAUGES.items():
            began = time.process_time()
            rule = at.BiasTolerance(
                DELTAS[0], k_min=1, k_max=config.k_max, lags=config.lags, gauge=gauge
            )
            request = rule.request(rule.init(), None)
            source = at.measure.Source(
                objective, stream, config.burn_in, torch.Generator().manual_seed(2 + repeat)
            )
            evidence = request.measure(source)
            for delta in DELTAS:
                state = dataclasses.replace(rule, delta=delta).update(rule.init(), evidence)
                assert state.decision is not None
                found.append(
                    {
                        "repeat": repeat,
                        "gauge": name,
                        "delta": delta,
                        "k": state.k,
                        "outcome": state.decision.outcome.name,
                        "said": state.decision.relative_bias,
                        "beta": state.decision.beta,
                        "seconds": time.process_time() - began,
                    }
                )
    return found


def judge(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join what was chosen with what is true there."""
    rows = []
    for point in points:
        curve = {t["k"]: t for t in point["truth"]}
        visible = math.isfinite(curve[1]["high"]) and curve[0]["relative"] > 0.0
        for choice in point["choices"]:
            at_k = curve[min(curve, key=lambda k: abs(k - choice["k"]))]
            enough = [
                k
                for k in curve
                if all(curve[j]["relative"] <= choice["delta"] for j in curve if j >= k)
            ]
            rows.append(
                {
                    "epoch": point["epoch"],
                    **choice,
                    "true": at_k["relative"] if visible else None,
                    "true_low": at_k["low"] if visible else None,
                    "true_high": at_k["high"] if visible else None,
                    "k_needed": min(enough) if visible and enough else None,
                    "kept": at_k["low"] <= choice["delta"] if visible else None,
                }
            )
    return rows


def is_resolved(row: dict[str, Any]) -> bool:
    """Whether the gauge gave an answer."""
    return row["outcome"] not in ("UNRESOLVED", "NO_BOUND", "NO_DECAY")


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the table: per gauge and delta, how often kept, and how much too large K is."""
    lines = [
        "| gauge | delta | checks | resolved | kept | K / K needed, median (10 %, 90 %) "
        "| seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in GAUGES:
        for delta in DELTAS:
            mine = [r for r in rows if r["gauge"] == name and r["delta"] == delta]
            judged = [r for r in mine if r["kept"] is not None]
            resolved = [r for r in judged if is_resolved(r)]
            if not resolved:
                lines.append(f"| {name} | {delta:g} | {len(judged)} | 0 | | | |")
                continue
            kept = np.mean([r["kept"] for r in resolved])
            sized = [r for r in resolved if r["k_needed"]]
            ratio = np.array([r["k"] / r["k_needed"] for r in sized])
            seconds = np.median([r["seconds"] for r in mine])
            low, middle, high = np.quantile(ratio, [0.1, 0.5, 0.9])
            lines.append(
                f"| {name} | {delta:g} | {len(judged)} | {len(resolved)} | {kept:.0%} | "
                f"{middle:.2f} ({low:.2f}, {high:.2f}) | {seconds:.1f} |"
            )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw K and the true bias there against epoch, one column per gauge."""
    figure = Figure(figsize=(8.8, 6.2), layout="constrained")
    axes: Any = figure.subplots(2, len(GAUGES), sharex=True, sharey="row")
    styles = dict(zip(DELTAS, ((BLUE, "s", "--"), (VERMILION, "^", "-")), strict=True))
    for (upper, lower), gauge in zip(axes.T, GAUGES, strict=True):
        here = [r for r in rows if r["gauge"] == gauge and is_resolved(r)]
        kept = [r["kept"] for r in here if r["kept"] is not None]
        upper.set_title(f"{gauge}: {sum(kept)} of {len(kept)} keep delta", fontsize=10)
        for i, (delta, (colour, marker, line)) in enumerate(styles.items()):
            mine = [r for r in here if r["delta"] == delta]
            x = np.array([r["epoch"] for r in mine], float) + 3 * i - 1.5  # beside each other
            points = {"marker": marker, "s": 14, "facecolors": "none", "edgecolors": colour}
            upper.scatter(x, [r["k"] for r in mine], lw=0.9, **points)
            seen = [(e, r["true"]) for e, r in zip(x, mine, strict=True) if r["true"] is not None]
            lower.scatter([e for e, _ in seen], [max(b, LEAST) for _, b in seen], lw=0.9, **points)
            needed = sorted(
                {(r["epoch"], r["k_needed"]) for r in rows if r["delta"] == delta and r["k_needed"]}
            )
            level = {"color": colour, "ls": line, "lw": 1.3}
            label = f"needed at {delta:g}"
            upper.plot(*zip(*needed, strict=True), drawstyle="steps-mid", label=label, **level)
            lower.axhline(delta, label=f"delta = {delta:g}", **level)
        for panel, ticks in ((upper, (1, 2, 4, 8, 16, 32, 64)), (lower, (0.01, 0.1, 0.5, 1))):
            panel.set_yscale("log")
            panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
            panel.minorticks_off()
            panel.grid(alpha=0.25, lw=0.5)
            panel.spines[["top", "right"]].set_visible(False)
    axes[1, 0].set_ylim(LEAST / 1.15, 1.0)
    axes[0, 0].set_ylabel("K that the gauge chooses (steps)")
    axes[1, 0].set_ylabel("true relative bias at that K\n(less than 0.01: at the edge)")
    for panel in axes[:, -1]:
        label_ends(panel)
    figure.supxlabel("epoch", fontsize=10)
    title = "Lower row: a point above the line of its colour breaks the promise"
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)


def measure(given: argparse.Namespace, cells: Path) -> None:
    """Train, and write what is true and what is chosen at every epoch, unless it is there."""
    torch.set_num_threads(1)
    config = PRESETS["paper"].changed(k=given.k, data=given.data)
    train(config, given.work)
    stream, model = config.streams()["train"], config.model()
    for epoch in reversed(EPOCHS) if given.backwards else EPOCHS:
        model.load_state_dict(torch.load(given.work / f"{epoch}.pt"))
        for name, ask in (
            ("truth", lambda: truth(model, config, stream)),
            ("choices", lambda: choices(model, config, stream, given.repeats)),
        ):
            path = cells / f"{name}-{epoch}.json"
            if not path.exists():
                path.write_text(json.dumps(ask()))
                print(f"epoch {epoch}: {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="the released copy arrays, fixed m")
    parser.add_argument("--k", type=int, default=15, help="K of the run that is looked at")
    parser.add_argument("--work", type=Path, default=Path("runs/promise"), help="parameters")
    parser.add_argument("--out", type=Path, default=Path("paper/results/promise"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--backwards", action="store_true", help="for a second process beside")
    parser.add_argument("--tables-only", action="store_true", help="from the cells there are")
    given = parser.parse_args()
    cells = given.out / "cells"
    if not given.tables_only:
        if given.data is None:
            parser.error("--data is needed to train and measure")
        cells.mkdir(parents=True, exist_ok=True)
        measure(given, cells)
    parts = ("truth", "choices")
    found = {e: {p: cells / f"{p}-{e}.json" for p in parts} for e in EPOCHS}
    rows = judge(
        [
            {"epoch": epoch, **{part: json.loads(path.read_text()) for part, path in paths.items()}}
            for epoch, paths in found.items()
        ]
    )
    with (given.out / "checks.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    title = "# Asked against true relative bias, by gauge"
    (given.out / "table.md").write_text(f"{title}\n\n{summary(rows)}\n")
    draw(rows, given.out / "asked_against_true.png")
    print(summary(rows))


if __name__ == "__main__":
    main()
