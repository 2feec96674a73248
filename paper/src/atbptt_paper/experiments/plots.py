"""The paper's figures from finished cells: adaptive settings solid and dark, fixed ones dashed."""

from __future__ import annotations

import textwrap
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..palette import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from .cells import score_of
from .paper import Experiment

Cells = list[dict[str, Any]]


FIXED = [BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, "black"]


X_LABELS = {
    "data_passes": "data passes (epochs, probes included)",
    "seconds": "processor time of training, probes included (s)",
}


ADAPTIVE = [("black", "o"), ("0.35", "s"), ("0.6", "^")]


def write_figures(experiment: Experiment, cells: Cells, folder: Path) -> list[Path]:
    """Draw every figure of the experiment; return the files."""
    valid, test, *others = experiment.metrics
    label = experiment.metrics
    figures: dict[str, Figure] = {
        "test.png": _curves(experiment, cells, test, f"{label[test]} at the best validation"),
        "valid.png": _curves(experiment, cells, valid, label[valid]),
        "best.png": _curves(experiment, cells, valid, f"best {label[valid]} so far", best=True),
        "decay.png": _decay(experiment, cells),
    }
    for name in others:
        figures[f"{name}.png"] = _curves(experiment, cells, name, label[name])
    if experiment.variants and all("seconds" in cell["curves"] for cell in cells):
        figures["seconds.png"] = _curves(
            experiment, cells, valid, f"best {label[valid]} so far", best=True, x="seconds"
        )
        if any("delta" in variant for variant in experiment.variants.values()):
            figures["k_used.png"] = _curves(experiment, cells, "k", "truncation length K (steps)")
    if all(len(cell["repeats"]) > 1 for cell in cells):  # one epoch is no curve
        figures["k.png"] = _repeats(experiment, cells, "k", "truncation length K (steps)")
        figures["bias.png"] = _repeats(
            experiment, cells, "relative_bias", "estimated relative bias at K"
        )
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=130)
    return [folder / name for name in figures]


def _axes(experiment: Experiment, y: str, x: str) -> Axes:
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    figure.suptitle(experiment.title, fontsize="medium")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25, lw=0.5)
    return axes


def _style(experiment: Experiment, setting: str) -> dict[str, Any]:
    adaptive = [f"delta={d:g}" for d in experiment.deltas]
    if setting not in adaptive:
        base, *rarer = setting.split(", ")  # a variant of a setting shares its colour
        i = list(experiment.settings).index(base)
        line = ":" if rarer else "--"
        return {"color": FIXED[i % len(FIXED)], "ls": line, "lw": 1.3, "label": setting}
    colour, marker = ADAPTIVE[adaptive.index(setting) % len(ADAPTIVE)]
    return {
        "color": colour, "ls": "-", "lw": 1.6, "marker": marker, "ms": 3.5, "label": setting,
    }  # fmt: skip


def _by_setting(experiment: Experiment, cells: Cells) -> dict[str, Cells]:
    """Group cells, in the order of the paper's table."""
    grouped = {s: [c for c in cells if c["setting"] == s] for s in experiment.settings}
    return {setting: mine for setting, mine in grouped.items() if mine}


def _curves(
    experiment: Experiment,
    cells: Cells,
    metric: str,
    label: str,
    *,
    best: bool = False,
    x: str = "data_passes",
) -> Figure:
    """Mean over initialisations against data passes, or seconds."""
    axes = _axes(experiment, label, X_LABELS[x])
    for setting, mine in _by_setting(experiment, cells).items():
        length = min(len(cell["curves"][metric]) for cell in mine)
        values = np.array([cell["curves"][metric][:length] for cell in mine], dtype=float)
        values *= experiment.factors.get(metric, 1.0)
        if best:
            values = np.fmin.accumulate(values, axis=1)
        passes = np.array([cell["curves"][x][:length] for cell in mine], dtype=float)
        axes.plot(
            passes.mean(0),
            values.mean(0),
            markevery=max(1, length // 12),
            **_style(experiment, setting),
        )
    if not metric.endswith("_ppl"):
        _leave_out_the_start(axes)
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:.3g}")
        axes.yaxis.set_minor_formatter("{x:.3g}")
        axes.tick_params(axis="y", which="both", labelsize="small")
    # Beside the axes: inside, it would lie on the curves.
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return _figure(axes)


def _leave_out_the_start(axes: Axes) -> None:
    """Fit the y axis to what comes after the first tenth of every curve, and say so if it cuts."""
    curves = [np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()]
    later = np.concatenate([y[len(y) // 10 + 1 :] for y in curves if len(y) > 10] or curves)
    if max(y.max() for y in curves) > later.max():
        room = 0.08 * (later.max() - later.min())
        axes.set_ylim(later.min() - room, later.max() + room)
        axes.set_title("the first epochs lie above", fontsize="x-small", loc="right")


def _repeats(experiment: Experiment, cells: Cells, name: str, label: str) -> Figure:
    """Median and 95 % range of the repeated estimates; where there is no bound, none is drawn."""
    axes = _axes(experiment, label, "epoch")
    for setting, mine in _by_setting(experiment, cells).items():
        style = _style(experiment, setting)
        epochs = [r["epoch"] for r in mine[0]["repeats"]]
        if name == "k" and setting.startswith("K="):
            axes.axhline(int(setting[2:]), **{**style, "lw": 0.9})
            continue
        middle: list[float] = []
        low: list[float] = []
        high: list[float] = []
        for epoch in epochs:
            values = [
                np.inf if v is None else v
                for cell in mine
                for r in cell["repeats"]
                if r["epoch"] == epoch
                for v in r[name]
            ]
            ordered = np.sort(values)
            pick = [ordered[round(q * (len(ordered) - 1))] for q in (0.5, 0.025, 0.975)]
            for target, value in zip((middle, low, high), pick, strict=True):
                target.append(value if np.isfinite(value) else np.nan)
        axes.plot(epochs, middle, **style)
        axes.fill_between(epochs, low, high, color=style["color"], alpha=0.12, lw=0)
    if name == "relative_bias":
        axes.set_yscale("log")
        for delta in experiment.deltas:
            axes.axhline(delta, color="0.5", lw=0.7, ls=":")
            axes.annotate(
                f"delta = {delta:g}",
                (0.01, delta),
                xycoords=("axes fraction", "data"),
                fontsize="x-small",
                ha="left",
                va="center",
                zorder=5,
                bbox={"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 0.6},
            )
        # A large K before anything is learnt may have 1e-30, beside which all else is one line.
        floor = min(experiment.deltas, default=0.1) / 1000
        notes = ["no point: no bound"]
        if axes.get_ylim()[0] < floor < axes.get_ylim()[1]:
            axes.set_ylim(bottom=floor)
            notes.append(f"less than {floor:g} lies below")
        axes.set_title("; ".join(notes), fontsize="x-small", loc="right")
    # Beside the axes: inside, it would lie on the curves.
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return _figure(axes)


def _decay(experiment: Experiment, cells: Cells) -> Figure:
    """The decay at the best parameters of the setting with the best validation number.

    All of the state, its parts where there are several, and the verdict on stability.
    """
    best = min(cells, key=lambda cell: score_of(cell, next(iter(experiment.metrics))))
    decay = best["decay"]
    axes = _axes(experiment, "gradient norm at lag k", "lag k (steps)")
    verdict = textwrap.fill(best["stability"], 90)
    axes.set_title(f"{best['setting']}, initialisation {best['init']}\n{verdict}", fontsize="small")
    lags = np.arange(len(decay["mean"]))

    def positive(values: list[float | None]) -> np.ndarray:
        numbers = np.array([np.nan if v is None else v for v in values], dtype=float)
        return np.where(numbers > 0, numbers, np.nan)

    for i, draw in enumerate(decay["draws"]):
        axes.plot(lags, positive(draw), color="0.75", lw=0.7, label=None if i else "single losses")
    axes.plot(lags, positive(decay["mean"]), color=BLUE, lw=2, label="mean")
    parts = list(decay.get("components", {}).items())
    colours = cycle((ORANGE, GREEN, VERMILION, PURPLE, SKY))
    for (name, means), colour in zip(parts if len(parts) > 1 else (), colours, strict=False):
        label = f"{name}: beta = {decay['component_beta'][name]:.4f}"
        axes.plot(np.arange(len(means)), positive(means), color=colour, lw=1.2, label=label)
    span = np.arange(decay["tau"], decay["last"] + 1)
    start = decay["mean"][decay["tau"]]
    if decay["beta"] > 0 and start:
        line = start * decay["beta"] ** (span - span[0])
        axes.plot(span, line, "k--", lw=1.5, label=f"fit: beta = {decay['beta']:.4f}")
    axes.set_yscale("log")
    axes.legend(fontsize="small")
    return _figure(axes)


def _figure(axes: Axes) -> Figure:
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    return figure
