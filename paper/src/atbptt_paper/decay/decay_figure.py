"""The decay of one model as a figure, drawn without pyplot: no display, no global state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from adaptive_tbptt.estimate import DecayFit, LagProfile, TruncationDecision

from ..labels import label_ends
from ..palette import BLUE, GREY, VERMILION


def decay_figure(
    profile: LagProfile,
    fit: DecayFit,
    decisions: Sequence[TruncationDecision] = (),
    path: str | Path | None = None,
    draws: int = 50,
) -> Figure:
    """Draw the paper's figure 'Gradient norms': single draws in gray, their mean in blue.

    Args:
        profile: the measured norms.
        fit: drawn as a dashed line over the lags it was fitted on.
        decisions: each marked by a vertical line at its K.
        path: where to save the figure; the suffix gives the format.
        draws: at most so many single draws.
    """
    shown = profile.measured
    mean = shown.mean(axis=1)
    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    lags = np.arange(len(mean))
    seen = ~profile.underflowed

    def positive(values: np.ndarray) -> np.ndarray:
        return np.where((values > 0.0) & seen, values, np.nan)

    for i, column in enumerate(shown.T[:draws]):
        axes.plot(
            lags, positive(column), color="0.75", lw=0.6, label="single losses" if i == 0 else None
        )
    axes.plot(lags, positive(mean), color=BLUE, lw=2.0, label="mean")
    if fit.beta > 0.0:
        span = np.arange(fit.tau, fit.last + 1)
        line = mean[span[0]] * np.exp(fit.log_beta * (span - span[0]))
        axes.plot(span, line, color="black", lw=1.5, ls="--", label=f"fit: beta = {fit.beta:.4f}")
    for decision in decisions:
        mark = "" if decision.outcome.met else " (not met)"
        label = f"delta = {decision.delta:g}: K = {decision.k}{mark}"
        axes.axvline(decision.k, color=VERMILION, lw=1.2, label=label)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if np.isfinite(positive(mean)).any():  # single losses may be far below the mean
        low = max(low, np.nanmin(positive(mean)) / 1000)
    axes.set_ylim(low, high)
    _name_lines(axes, sorted(decisions, key=lambda decision: decision.k))
    axes.set_xlabel("lag k (steps)")
    axes.set_ylabel(r"gradient norm $\phi_k = \|\partial L_s / \partial h_{s-k}\|$")
    axes.set_title(
        f"Mean of {profile.samples} losses, {profile.lags} lags",
        fontsize=11,
        pad=6 + 14 * len(decisions),
    )
    named = {str(line.get_label()): line for line in axes.get_lines()}
    label_ends(axes, {n: line for n, line in named.items() if n == "mean" or n[:3] == "fit"})
    axes.text(0.02, 0.03, "grey: single losses", transform=axes.transAxes, color=GREY, fontsize=9)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    return figure


def _name_lines(axes: Axes, decisions: Sequence[TruncationDecision]) -> None:
    """Write the tolerances above the axes, where their upright lines end."""
    for i, decision in enumerate(decisions):
        mark = "" if decision.outcome.met else " (not met)"
        right = decision.k > 0.6 * axes.get_xlim()[1]
        axes.annotate(
            f"delta = {decision.delta:g}: K = {decision.k}{mark}",
            (decision.k, 1.0), (0, 3 + 14 * (len(decisions) - 1 - i)),
            axes.get_xaxis_transform(), "offset points",
            ha="right" if right else "left", va="bottom", color=VERMILION, fontsize=9,
        )  # fmt: skip
