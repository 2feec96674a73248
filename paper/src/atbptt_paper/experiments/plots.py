"""The paper's figures from finished cells: at most six curves a panel, their names beside them."""

from __future__ import annotations

import math
import statistics
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..labels import label_ends, leave_out_the_start
from ..palette import BLUE, BLUES, GREEN, GREY, ORANGE, PURPLE, REDS, SKY, VERMILION
from .cells import score_of
from .paper import Experiment

Cells = list[dict[str, Any]]


VARIANTS = (BLUE, VERMILION, GREEN, PURPLE, "black", ORANGE, SKY)


STYLES = ("-", "--", "-.", ":")


X_LABELS = {
    "data_passes": "data passes (epochs, probes included)",
    "seconds": "processor time of training, probes included (s)",
}


BIASES = (0.01, 10.0)  # arbitrary: a tenth of the smallest delta of the paper, and ten times 100 %


SMOOTHED = 9  # epochs; arbitrary: hides single epochs, shows what lasts


def write_figures(experiment: Experiment, cells: Cells, folder: Path) -> list[Path]:
    """Draw every figure of the experiment; return the files."""
    valid, test, *others = experiment.metrics
    label = experiment.metrics
    figures: dict[str, Figure] = {
        "test.png": _curves(experiment, cells, test, f"{label[test]} at the best validation"),
        "valid.png": _curves(experiment, cells, valid, label[valid], every_epoch=True),
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


def _panels(
    experiment: Experiment, rows: int, columns: int, title: str, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure with its title, and its axes."""
    width, height = (8.8 if columns > 1 else 7.2), (4.0 if rows == 1 else 0.9 + 2.4 * rows)
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(_wrapped(f"{experiment.title}: {title}", int(11 * width)), fontsize=11)
    panels = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axes in panels:
        axes.grid(alpha=0.25, lw=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _wrapped(text: str, width: int) -> str:
    """Return a text in as few lines as fit, of about the same length."""
    lines = len(textwrap.wrap(text, width))
    return next(
        filled
        for narrow in range(len(text) // lines, width + 1)
        if (filled := textwrap.fill(text, narrow)).count("\n") < lines
    )


def _style(experiment: Experiment, setting: str) -> dict[str, Any]:
    """Return colour and line: darker where K is larger or delta smaller."""
    fixed, adaptive = ([f"K={k}" for k in experiment.ks], _adaptive(experiment))
    if setting in fixed:
        shade = fixed.index(setting) * (len(BLUES) - 1) // max(1, len(fixed) - 1)
        return {"color": BLUES[shade], "lw": 1.5}
    if setting in adaptive:
        return {"color": REDS[adaptive.index(setting) % len(REDS)], "lw": 1.7}
    base = setting.partition(", ")[0]  # a variant of a setting looks like it
    i = list(experiment.settings).index(base)
    return {"color": VARIANTS[i % len(VARIANTS)], "ls": STYLES[i % len(STYLES)], "lw": 1.5}


def _adaptive(experiment: Experiment) -> list[str]:
    return [f"delta={d:g}" for d in experiment.deltas]


def _by_setting(experiment: Experiment, cells: Cells) -> dict[str, Cells]:
    """Group cells, in the order of the paper's table."""
    grouped = {s: [c for c in cells if c["setting"] == s] for s in experiment.settings}
    return {setting: mine for setting, mine in grouped.items() if mine}


def _groups(experiment: Experiment, settings: list[str]) -> dict[str, list[str]]:
    """Divide settings into panels: fixed and adaptive ones, or variants and their variants."""
    if len(settings) <= 4:  # arbitrary: so many lines can be told apart
        return {"": settings}
    groups: dict[str, list[str]] = {}
    for setting in settings:
        if setting in _adaptive(experiment):
            title = "K chosen by delta"
        elif not experiment.variants:
            title = "fixed K"
        else:
            base, _, rarer = setting.partition(", ")
            several = any(", " in name for name in experiment.variants)
            title = rarer.replace("=", " = ") or ("K2 = K" if several else "")
            if base.startswith("slow"):
                title += ", K falls slowly"
        groups.setdefault(title, []).append(setting)
    for title, mine in groups.items():  # a fixed K stands beside every group of variants
        if experiment.variants and not any(name.startswith("K=") for name in mine):
            same = title.partition(", ")[0]
            mine += [name for name in groups.get(same, []) if name.startswith("K=")]
    return groups


def _curves(
    experiment: Experiment,
    cells: Cells,
    metric: str,
    label: str,
    *,
    best: bool = False,
    every_epoch: bool = False,
    x: str = "data_passes",
) -> Figure:
    """Mean over initialisations against data passes, or seconds."""
    curves: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for setting, mine in _by_setting(experiment, cells).items():
        length = min(len(cell["curves"][metric]) for cell in mine)
        values = np.array([cell["curves"][metric][:length] for cell in mine], dtype=float)
        values *= experiment.factors.get(metric, 1.0)
        if best:
            values = np.fmin.accumulate(values, axis=1)
        passes = np.array([cell["curves"][x][:length] for cell in mine], dtype=float)
        curves[setting] = passes.mean(0), values.mean(0)
    groups = _groups(experiment, list(curves))
    mixed = not experiment.variants and len(groups) > 1
    smooth = every_epoch and max(len(y) for _, y in curves.values()) > 5 * SMOOTHED
    scores = _scores(experiment, cells, metric) if metric in experiment.metrics else {}
    fixed = min((s for s in scores if s.startswith("K=")), key=scores.__getitem__, default=None)
    title = "the K that every epoch was trained with"
    if scores:
        title = f"{label}. {_lowest(scores, _adaptive(experiment))}"
    if every_epoch:
        title = f"{label} after every epoch; the dot is a setting's lowest"
        title += f"; curves are medians of {SMOOTHED} epochs" if smooth else ""
    rows, columns = (2, 2) if len(groups) > 2 else (1, len(groups))
    # Panels of fixed and adaptive settings have scales of their own: the best fixed K is in both.
    figure, panels = _panels(
        experiment, rows, columns, title, sharex=True, sharey=False if mixed else "all"
    )
    for axes in panels[len(groups) :]:
        axes.set_visible(False)
    for axes, (heading, settings) in zip(panels, groups.items(), strict=False):
        axes.set_title(heading, fontsize=10)
        named = {}
        for setting in settings:
            name = setting.partition(", ")[0]  # the panel's heading says the rest
            named[name] = (curves[setting], _style(experiment, setting))
        if mixed and fixed is not None and fixed not in settings:
            named[f"{fixed}, best fixed"] = (curves[fixed], {"color": GREY, "ls": "--", "lw": 1.5})
        for name, ((across, y), style) in named.items():
            drawn = _running_median(y) if smooth else y
            axes.plot(across, drawn, label=name, **style)
            if every_epoch and np.isfinite(y).any():
                lowest = np.nanargmin(y)
                axes.plot(across[lowest], y[lowest], "o", ms=4.5, color=style["color"])
    most = 10.0 if metric.endswith("_ppl") else math.inf  # arbitrary: no plateau is above
    panels = panels[: len(groups)]
    for together in ([axes] for axes in panels) if mixed else [panels]:
        if metric != "k" and _fit(together, most):
            for axes in together:
                axes.set_title(f"{axes.get_title()} (starts above)".strip(), fontsize=10)
    for axes in panels:
        label_ends(axes)
    figure.supxlabel(X_LABELS[x], fontsize=10)
    figure.supylabel(label, fontsize=10)
    return figure


def _fit(panels: list[Axes], most: float) -> bool:
    """Give panels that share an axis the limits that all their curves need; tell if it cuts."""
    cuts, limits = [], []
    for axes in panels:
        cuts.append(leave_out_the_start(axes, most))
        limits.append(axes.get_ylim())
    panels[0].set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    return any(cuts)


def _scores(experiment: Experiment, cells: Cells, metric: str) -> dict[str, float]:
    """Return a metric by setting, as the table has it."""
    factor = experiment.factors.get(metric, 1.0)
    return {
        setting: factor * statistics.fmean(score_of(cell, metric) for cell in mine)
        for setting, mine in _by_setting(experiment, cells).items()
    }


def _lowest(scores: dict[str, float], adaptive: list[str]) -> str:
    """Say which settings end lowest: the best adaptive and the best fixed one, or the best two."""
    order = sorted(scores, key=scores.__getitem__)
    found = [next((s for s in order if (s in adaptive) is kind), None) for kind in (True, False)]
    told = sorted((s for s in found if s is not None), key=order.index)
    told = told if len(told) > 1 else order[:2]
    digits = {s: 1 if abs(scores[s]) >= 100 else 3 for s in told}
    pairs = [f"{s} with {scores[s]:.{digits[s]}f}" for s in told]
    return "Lowest at the end: " + ", then ".join(pairs)


def _running_median(values: np.ndarray) -> np.ndarray:
    """Return the median of every value and its neighbours; fewer at the ends."""
    half = SMOOTHED // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return np.array([np.nanmedian(w) if np.isfinite(w).any() else np.nan for w in windows])


def _repeats(experiment: Experiment, cells: Cells, name: str, label: str) -> Figure:
    """Median and 95 % range of the repeated estimates, one panel a setting."""
    grouped = _by_setting(experiment, cells)
    adaptive = [setting for setting in grouped if setting in _adaptive(experiment)]
    shown = list(grouped) if name != "k" or not adaptive else adaptive
    columns = min(4, len(shown))
    number = len(grouped[shown[0]][0]["repeats"][0][name])
    title = f"{label}: median and 95 % range of {number} repeated estimates"
    if name == "relative_bias":
        title += f". Dashed: delta. Beyond {BIASES[0]:g} or {BIASES[1]:g}: at the edge"
    figure, panels = _panels(
        experiment, math.ceil(len(shown) / columns), columns, title, sharex=True, sharey=True
    )
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    for axes, setting in zip(panels, shown, strict=False):
        epochs, (middle, low, high) = _quantiles(grouped[setting], name)
        unbounded = int(np.isinf(middle).sum())
        if name == "relative_bias":
            known = np.where(np.isinf(middle), np.nan, middle)
            middle, low, high = (np.clip(part, *BIASES) for part in (known, low, high))
        colour = VERMILION if setting in adaptive else BLUE
        axes.plot(epochs, middle, color=colour, lw=1.6, marker="o", ms=2.5)
        axes.fill_between(epochs, low, high, color=colour, alpha=0.2, lw=0)
        axes.set_title(setting, fontsize=10)
        if unbounded:
            text = f"no bound in the median\nat {unbounded} of {len(epochs)} epochs"
            axes.text(0.97, 0.04, text, transform=axes.transAxes, fontsize=8, ha="right")
        if name == "relative_bias" and setting in adaptive:
            axes.axhline(float(setting[6:]), color="black", lw=1, ls="--")
    if name == "relative_bias":
        panels[0].set_yscale("log")
        panels[0].set_ylim(BIASES[0] / 1.15, BIASES[1] * 1.15)
        panels[0].yaxis.set_major_formatter("{x:g}")
    else:
        panels[0].set_ylim(bottom=0)
        scores = _scores(experiment, cells, next(iter(experiment.metrics)))
        fixed = min((s for s in scores if s.startswith("K=")), key=scores.__getitem__, default=None)
        if adaptive and fixed is not None:
            style: dict[str, Any] = {"color": GREY, "lw": 1.2, "ls": "--"}
            for axes in panels[: len(shown)]:
                axes.axhline(int(fixed[2:]), label=f"{fixed}, best fixed", **style)
            label_ends(panels[len(shown) - 1])
    figure.supxlabel("epoch", fontsize=10)
    figure.supylabel(label, fontsize=10)
    return figure


def _quantiles(cells: Cells, name: str) -> tuple[list[int], np.ndarray]:
    """Return epochs, and the median and 95 % range of what was estimated; infinite: no bound."""
    epochs = [r["epoch"] for r in cells[0]["repeats"]]
    found = []
    for epoch in epochs:
        values = [
            np.inf if v is None else v
            for cell in cells
            for r in cell["repeats"]
            if r["epoch"] == epoch
            for v in r[name]
        ]
        ordered = np.sort(values)
        found.append([ordered[round(q * (len(ordered) - 1))] for q in (0.5, 0.025, 0.975)])
    return epochs, np.array(found, dtype=float).T


def _decay(experiment: Experiment, cells: Cells) -> Figure:
    """The decay at the best parameters of the setting with the best validation number.

    All of the state, its parts where there are several, and the verdict on stability.
    """
    best = min(cells, key=lambda cell: score_of(cell, next(iter(experiment.metrics))))
    decay = best["decay"]
    figure, (axes,) = _panels(
        experiment, 1, 1, f"{best['setting']}, lowest on validation, is {best['stability']}"
    )
    figure.set_size_inches(7.2, 4.6)
    axes.set_xlabel("lag k (steps)")
    axes.set_ylabel("gradient norm at lag k")
    lags = np.arange(len(decay["mean"]))

    def positive(values: list[float | None]) -> np.ndarray:
        numbers = np.array([np.nan if v is None else v for v in values], dtype=float)
        return np.where(numbers > 0, numbers, np.nan)

    for draw in decay["draws"]:
        axes.plot(lags, positive(draw), color="0.8", lw=0.7, zorder=1)
    parts = {n: p for n, p in decay.get("components", {}).items() if len(decay["components"]) > 1}
    colours = (ORANGE, GREEN, VERMILION, PURPLE)
    for (name, means), colour in zip(parts.items(), colours, strict=False):
        label = f"{name}: beta = {decay['component_beta'][name]:.4f}"
        axes.plot(np.arange(len(means)), positive(means), color=colour, lw=1.2, label=label)
    mean = positive(decay["mean"])
    axes.plot(lags, mean, color=BLUE, lw=2.2, label="mean", zorder=1.5)
    span = np.arange(decay["tau"], decay["last"] + 1)
    start = decay["mean"][decay["tau"]]
    if decay["beta"] > 0 and start:
        line = start * decay["beta"] ** (span - span[0])
        axes.plot(span, line, "k--", lw=1.5, label=f"fit: beta = {decay['beta']:.4f}")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if np.isfinite(mean).any():  # single losses may be 1e-18, beside which all else is one line
        axes.set_ylim(max(low, np.nanmin(mean) / 1000), high)
    label_ends(axes)
    axes.text(0.02, 0.03, "grey: single losses", transform=axes.transAxes, color="0.3",
              fontsize=9, bbox={"facecolor": "white", "alpha": 0.8, "lw": 0, "pad": 1})  # fmt: skip
    return figure
