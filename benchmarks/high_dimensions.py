"""'Challenges in higher dimensions': beta and K by state norm and by parameter norm, as one trains.

Trains the small Penn Treebank model with the paper's dropout and weight decay, without each, and
without both, and looks at beta and K by every gauge on the way. Goes on where it stopped.

    python benchmarks/high_dimensions.py --data FOLDER --out paper/results/high-dimensions
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

import adaptive_tbptt as at
from adaptive_tbptt.diagnosis.palette import BLUE, GREEN, ORANGE, VERMILION
from adaptive_tbptt.measure import probe_segment
from adaptive_tbptt.train import origin
from atbptt_paper.experiments.run import make_optimizer
from atbptt_paper.tasks.language_task import PRESETS, LanguageConfig

DELTAS = (0.9, 0.5, 0.1)
SETTINGS: dict[str, dict[str, Any]] = {
    "dropout 0.2, weight decay 1e-7": {},
    "no dropout": {"dropout": 0.0},
    "no weight decay": {"weight_decay": 0.0},
    "neither": {"dropout": 0.0, "weight_decay": 0.0},
}
GAUGES: dict[str, at.truncate.Gauge] = {
    "printed": at.truncate.PaperGauge(),
    "release": at.truncate.ReleaseGauge(),
    "parameter bound": at.truncate.ParameterGauge(),
    "measured": at.truncate.MeasuredGauge(),
}
# The printed estimate with ||c_k|| for phi_k: what the choice of the norm alone does. No bound,
# but neither is the printed one.
EXCHANGED = "printed, of c_k"
COLUMNS = ("printed", EXCHANGED, "release", "parameter bound", "measured")


def measure(recurrent: at.model.Recurrent, config: LanguageConfig, stream: Any, probes: int) -> Any:
    """Return the profile of several probes, the contributions of each probe as one group."""
    generator = torch.Generator().manual_seed(1)
    profiles = []
    for _ in range(probes):
        profile = probe_segment(
            recurrent,
            config.loss_fn,
            stream.random_segment(config.burn_in + config.lags, generator),
            burn_in=config.burn_in,
            train=True,
            parameters=True,
            sketch=GAUGES["measured"].sketch,
        )
        assert profile.contributions is not None
        profiles.append(replace(profile, contributions=profile.contributions.merged()))
    return at.estimate.LagProfile.concatenate(profiles)


def look(recurrent: at.model.Recurrent, config: LanguageConfig, stream: Any, probes: int) -> Any:
    """Return beta of state and parameters, of each part, and K by every gauge."""
    profile = measure(recurrent, config, stream, probes)
    assert profile.contributions is not None
    parts = {n: norms[1:].mean(axis=1) for n, norms in profile.component_norms.items()}
    found: dict[str, Any] = {
        "samples": profile.samples,
        "beta": {
            "state": at.fit_decay(profile.mean, 0.9, floor=profile.floor).beta,
            "parameters": at.fit_decay(profile.contributions.mean, 0.9, floor=profile.floor).beta,
            **{n: at.fit_decay(v, 0.9, floor=profile.floor).beta for n, v in parts.items()},
        },
        "state_norms": profile.mean.tolist(),
        "parameter_norms": profile.contributions.mean.tolist(),
        "component_norms": {n: v.tolist() for n, v in parts.items()},
        "k": {},
    }
    curves = {name: gauge.bias(profile) for name, gauge in GAUGES.items()}
    of_c = profile.contributions.mean
    curves[EXCHANGED] = at.bias_bound(of_c, at.fit_decay(of_c, 0.9, floor=profile.floor))
    for name, curve in curves.items():
        for delta in DELTAS:
            choice = at.choose_truncation(curve, delta=delta, k_max=config.k_max)
            found["k"][f"{name}, {delta:g}"] = [choice.k, choice.outcome.name]
    return found


def run(config: LanguageConfig, path: Path, epochs: int, probes: int, last_probes: int) -> None:
    """Train and look after every epoch; write everything at the end."""
    streams, model = config.streams(), config.model()
    torch.manual_seed(config.seed)  # dropout
    recurrent = at.model.as_recurrent(model)
    looks = [{"epoch": 0, **look(recurrent, config, streams["train"], probes)}]

    def note(trainer: at.Trainer, metrics: dict[str, Any]) -> None:
        wanted = last_probes if metrics["epoch"] == epochs else probes
        found = look(recurrent, config, streams["train"], wanted)
        looks.append({"epoch": metrics["epoch"], "valid_loss": metrics["valid_loss"], **found})
        print(path.stem, metrics["epoch"], found["beta"], found["k"], flush=True)

    at.Trainer(
        at.AdaptiveTBPTT(model, config.loss_fn, config.controller(), seed=config.seed),
        make_optimizer(config, model),
        step_scale="sqrt",
        clip=config.make_clip(),
        eval_chunk=config.eval_chunk,
        callbacks=[note],
        show=False,
    ).fit(streams["train"], streams["valid"], epochs=epochs)
    path.write_text(json.dumps({"looks": looks, "origin": origin()}))


def table(runs: dict[str, Any]) -> str:
    """Return the last look of every setting as Markdown."""
    lines = [
        "# Beta and K after the last epoch",
        "",
        "| setting | epoch | valid PPL | beta, state | beta, parameters | "
        + " | ".join(f"K, {name}" for name in COLUMNS)
        + " |",
        "|" + "---|" * (5 + len(COLUMNS)),
    ]
    for name, found in runs.items():
        last = found["looks"][-1]
        ks = []
        for gauge in COLUMNS:
            entries = [last["k"][f"{gauge}, {delta:g}"] for delta in DELTAS]
            ks.append(", ".join(f"{k}{'' if o.startswith('MET') else '*'}" for k, o in entries))
        lines.append(
            f"| {name} | {last['epoch']} | {math.exp(last['valid_loss']):.1f} | "
            f"{last['beta']['state']:.4f} | {last['beta']['parameters']:.4f} | "
            + " | ".join(ks)
            + " |"
        )
    samples = sorted({found["looks"][-1]["samples"] for found in runs.values()})
    lines += [
        "",
        "K for delta = 0.9, 0.5, 0.1; a star where delta is not met or not resolved, with "
        f"{', '.join(map(str, samples))} losses.",
    ]
    return "\n".join(lines) + "\n"


def draw(runs: dict[str, Any], out: Path) -> None:
    """Draw beta against epoch, and the decay of both norms at the end."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, found), colour in zip(runs.items(), (BLUE, ORANGE, GREEN, VERMILION), strict=False):
        looks = found["looks"]
        epochs = [x["epoch"] for x in looks]
        left.plot(epochs, [x["beta"]["state"] for x in looks], color=colour, label=f"{name}: state")
        left.plot(epochs, [x["beta"]["parameters"] for x in looks], color=colour, ls="--")
        for kind, style in (("state_norms", "-"), ("parameter_norms", "--")):
            values = looks[-1][kind]
            right.plot([v / values[1] for v in values], color=colour, ls=style, lw=1.3)
    left.plot([], [], color="0.3", ls="--", label="dashed: norms of c_k, parameters")
    left.set(xlabel="epoch", ylabel="beta, fitted on the last tenth of the window")
    right.set(xlabel="lag k (steps)", ylabel="mean norm, divided by that at lag 1", yscale="log")
    left.legend(fontsize="small")
    figure.savefig(out / "beta.png", dpi=140)
    name, found = next(iter(runs.items()))
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    for (part, values), style in zip(
        found["looks"][-1]["component_norms"].items(), ("-", "--", ":", "-."), strict=False
    ):
        beta = found["looks"][-1]["beta"][part]
        axes.plot(range(1, len(values) + 1), values, ls=style, label=f"{part}: beta = {beta:.4f}")
    axes.set(title=name, xlabel="lag k (steps)", ylabel="mean gradient norm", yscale="log")
    axes.legend()
    figure.savefig(out / "components.png", dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder with the Penn Treebank text")
    parser.add_argument("--preset", default="ptb-small")
    parser.add_argument("--out", type=Path, default=Path("paper/results/high-dimensions"))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--probes", type=int, default=16, help="minibatches per look")
    parser.add_argument("--last-probes", type=int, default=128, help="the same, of the last look")
    parser.add_argument("--only", action="append", help="a setting; all by default")
    given = parser.parse_args()
    torch.set_num_threads(1)
    cells = given.out / "cells"
    cells.mkdir(parents=True, exist_ok=True)
    for name, changes in SETTINGS.items():
        path = cells / f"{name.replace(' ', '-').replace(',', '')}.json"
        if not path.exists() and (given.only is None or name in given.only):
            config = PRESETS[given.preset].changed(k=50, data=given.data)
            run(config.changed(**changes), path, given.epochs, given.probes, given.last_probes)
    paths = {n: cells / f"{n.replace(' ', '-').replace(',', '')}.json" for n in SETTINGS}
    runs = {n: json.loads(p.read_text()) for n, p in paths.items() if p.exists()}
    (given.out / "table.md").write_text(table(runs))
    draw(runs, given.out)
    print(table(runs))


if __name__ == "__main__":
    main()
