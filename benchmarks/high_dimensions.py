"""'Challenges in higher dimensions': what the state's norms say, and what the gradient misses.

Trains the small Penn Treebank model with the paper's dropout and weight decay, without each, and
without both. After the last epoch it sets the K that the paper's gauges ask for beside the bias of
the gradient, measured by level. Finished settings are not run again.

    python benchmarks/high_dimensions.py --data FOLDER --out paper/results/high-dimensions
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

import adaptive_tbptt as at
from adaptive_tbptt.diagnosis.palette import BLUE, VERMILION
from adaptive_tbptt.train import origin
from atbptt_paper.experiments.run import make_optimizer
from atbptt_paper.tasks.language_task import PRESETS, LanguageConfig

DELTAS = (0.9, 0.5, 0.1)
LOSSES = (10, 1)
CONTEXTS = (0, 1, 4, 16, 64)
SETTINGS: dict[str, dict[str, Any]] = {
    "dropout 0.2, weight decay 1e-7": {},
    "no dropout": {"dropout": 0.0},
    "no weight decay": {"weight_decay": 0.0},
    "neither": {"dropout": 0.0, "weight_decay": 0.0},
}
GAUGES: dict[str, at.truncate.StateGauge] = {
    "printed": at.truncate.PaperGauge(),
    "release": at.truncate.ReleaseGauge(),
}


def run(config: LanguageConfig, path: Path, epochs: int, segments: int) -> None:
    """Train, then measure in training mode."""
    streams, model = config.streams(), config.model()
    torch.manual_seed(config.seed)  # dropout
    tbptt = at.AdaptiveTBPTT(model, config.loss_fn, config.controller(), seed=config.seed)
    fit = at.Trainer(
        tbptt,
        make_optimizer(config, model),
        step_scale="sqrt",
        clip=config.make_clip(),
        eval_chunk=config.eval_chunk,
        show=False,
    ).fit(streams["train"], streams["valid"], epochs=epochs)
    model.train()
    source = at.measure.Source(
        tbptt.objective,
        streams["train"],
        config.burn_in,
        torch.Generator().manual_seed(1),
        seed=1,
    )
    profile = at.measure.LagRequest(config.lags, batches=max(2, segments // 8)).measure(source)
    curves = {name: gauge.bias(profile) for name, gauge in GAUGES.items()}
    found: dict[str, Any] = {
        "epoch": epochs,
        "valid_loss": fit.history[-1]["valid_loss"],
        "beta": curves["printed"].beta,
        "k": {
            f"{name}, {delta:g}": [choice.k, choice.outcome.name]
            for name, curve in curves.items()
            for delta in DELTAS
            for choice in [at.choose_truncation(curve, delta=delta, k_max=config.k_max)]
        },
        "origin": origin(),
    }
    gauge = at.truncate.MeasuredGauge(size=2**16)
    for losses in LOSSES:
        request = at.measure.LevelRequest(
            at.estimate.levels_up_to(config.lags), losses, segments, groups=32, size=2**16
        )
        evidence = request.measure(source)
        curve = gauge.bias(evidence)
        found[f"levels, {losses}"] = {
            **curve.brief(), "samples": curve.samples, "tail": _finite(curve.tail)
        }  # fmt: skip
        for delta in DELTAS:
            choice = at.choose_truncation(curve, delta=delta, k_min=0, k_max=config.k_max)
            found["k"][f"measured, {losses}, {delta:g}"] = [choice.k, choice.outcome.name]
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(path.stem, found["k"], flush=True)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def table(runs: dict[str, Any]) -> str:
    """Return every setting as a row of Markdown."""
    names = ["printed", "release", *(f"measured, {n}" for n in LOSSES)]
    lines = [
        "| setting | valid PPL | beta | " + " | ".join(f"K, {n}" for n in names) + " | "
        + " | ".join(f"bias, {LOSSES[0]} losses, context {c}" for c in CONTEXTS) + " |",
        "|" + "---|" * (3 + len(names) + len(CONTEXTS)),
    ]  # fmt: skip
    for name, found in runs.items():
        ks = []
        for gauge in names:
            entries = [found["k"][f"{gauge}, {delta:g}"] for delta in DELTAS]
            ks.append(", ".join(f"{k}{'' if o.startswith('MET') else '*'}" for k, o in entries))
        curve = found[f"levels, {LOSSES[0]}"]
        biases = []
        for context in CONTEXTS:
            i = curve["contexts"].index(context)
            bias, low, high = (curve[key][i] for key in ("bias", "low", "high"))
            biases.append("?" if bias is None else f"{bias:.3f} [{low:.3f}, {high:.3f}]")
        cells = [name, f"{math.exp(found['valid_loss']):.1f}", f"{found['beta']:.4f}", *ks, *biases]
        lines.append("| " + " | ".join(cells) + " |")
    note = "K for delta = 0.9, 0.5, 0.1; a star where delta is not met or not resolved."
    return "\n".join([*lines, "", note]) + "\n"


def draw(runs: dict[str, Any], path: Path) -> None:
    """Draw the measured bias against context, with its interval, one panel per setting."""
    figure = Figure(figsize=(8.8, 3.6), layout="constrained")
    panels = figure.subplots(1, len(runs), sharex=True, sharey=True)
    for axes, (name, found) in zip(panels, runs.items(), strict=True):
        for losses, colour, style in zip(LOSSES, (BLUE, VERMILION), ("-", "--"), strict=True):
            found_here = found[f"levels, {losses}"]
            curve = {k: found_here[k][:-1] for k in ("contexts", "bias", "low", "high")}
            label = f"windows of\n{losses} losses" if losses > 1 else "single losses"
            axes.plot(curve["contexts"], curve["bias"], color=colour, ls=style, label=label)
            limits = curve["low"], curve["high"]
            axes.fill_between(curve["contexts"], *limits, color=colour, alpha=0.15, lw=0)
        axes.set_title(name.replace(", ", ",\n"), fontsize=10)
        axes.set_xscale("symlog", base=2, linthresh=1)
        axes.set_xticks([0, 1, 4, 16, 64, 256], ["0", "1", "4", "16", "64", "256"])
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylim(0, 0.8)
    panels[0].set_ylabel("relative bias of the gradient")
    # Where neither a curve nor its interval is in the way.
    for i, (line, side) in enumerate(zip(panels[0].get_lines(), ("top", "bottom"), strict=True)):
        at = 3 * i
        panels[0].annotate(
            str(line.get_label()), line.get_xydata()[at], (0, 14 if i else -20),
            textcoords="offset points", va=side, color=line.get_color(), fontsize=9,
        )  # fmt: skip
    figure.supxlabel("context (steps)", fontsize=10)
    first = {name: found[f"levels, {LOSSES[0]}"]["bias"][0] for name, found in runs.items()}
    least, most = min(first, key=first.__getitem__), max(first, key=first.__getitem__)
    figure.suptitle(
        f"Without context {LOSSES[0]} losses miss {first[least]:.0%} of the gradient ({least}) "
        f"to {first[most]:.0%} ({most})",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder with the Penn Treebank text")
    parser.add_argument("--preset", default="ptb-small")
    parser.add_argument("--out", type=Path, default=Path("paper/results/high-dimensions"))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--segments", type=int, default=128, help="windows per measurement")
    given = parser.parse_args()
    torch.set_num_threads(1)
    cells = given.out / "levels"
    cells.mkdir(parents=True, exist_ok=True)
    paths = {n: cells / f"{n.replace(' ', '-').replace(',', '')}.json" for n in SETTINGS}
    for name, path in paths.items():
        if not path.exists():
            config = PRESETS[given.preset].changed(k=50, data=given.data)
            run(config.changed(**SETTINGS[name]), path, given.epochs, given.segments)
    runs = {name: json.loads(path.read_text()) for name, path in paths.items()}
    (given.out / "levels.md").write_text(table(runs))
    draw(runs, given.out / "levels.png")
    print(table(runs))


if __name__ == "__main__":
    main()
