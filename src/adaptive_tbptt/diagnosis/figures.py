"""Figures, drawn without pyplot so that nothing depends on a display or a global state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from ..estimate.decay import DecayFit
from ..estimate.lag_profile import LagProfile
from ..estimate.level_bias import LevelCurve
from ..estimate.truncation import TruncationDecision
from .model_diagnosis import Row
from .palette import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION


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
    styles = [(VERMILION, "-."), (GREEN, ":"), (ORANGE, "--"), (PURPLE, "-"), (SKY, "-.")]
    for i, decision in enumerate(decisions):
        colour, style = styles[i % len(styles)]
        mark = "" if decision.outcome.met else " (not met)"
        label = f"delta = {decision.delta:g}: K = {decision.k}{mark}"
        axes.axvline(decision.k, color=colour, ls=style, lw=1.5, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("lag k (steps)")
    axes.set_ylabel(r"gradient norm $\phi_k = \|\partial L_s / \partial h_{s-k}\|$")
    axes.set_title(f"{profile.samples} losses, {profile.lags} lags")
    axes.legend(fontsize="small", loc="upper right")
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    return figure


def bias_figure(rows: Sequence[Row], curve: LevelCurve, path: str | Path | None = None) -> Figure:
    """Draw the measured bias against context, and against what that context costs.

    Args:
        rows: one per context.
        curve: the measurement, for the title.
        path: where to save the figure; the suffix gives the format.
    """
    figure = Figure(figsize=(8.0, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    known = [row for row in rows if np.isfinite(row.high)]
    bias = np.array([100 * row.bias for row in known])
    spread = np.abs(
        np.array([[100 * row.low, 100 * row.high] for row in known]).reshape(-1, 2).T - bias
    )
    for axes, x in (
        (left, [row.context for row in known]),
        (right, [row.cost for row in known]),
    ):
        axes.errorbar(x, bias, yerr=spread, color=BLUE, marker="o", capsize=3, lw=1.5)
        axes.grid(color="0.9")
    right.margins(x=0.12)
    left.set_xscale("symlog", base=2, linthresh=1)
    left.set_xlim(-0.2, None)
    left.set_ylim(0, None)
    left.set_xlabel("context (steps)")
    left.set_ylabel("gradient missed (%)")
    right.set_xlabel("cost of a window (detach loop = 1)")
    for row, y in zip(known, bias, strict=True):
        if row.context == 0 or row.context >= 8:
            label = "your loop" if row.context == 0 else str(row.context)
            right.annotate(
                label, (row.cost, y), xytext=(5, 4), textcoords="offset points", fontsize=8
            )
    figure.suptitle(
        f"windows of {curve.losses} losses; {curve.samples} losses measured", fontsize=10
    )
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    return figure
