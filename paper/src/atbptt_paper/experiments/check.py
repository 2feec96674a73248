"""`atbptt check-bias`: what a run was promised, what it got, what each gauge says of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adaptive_tbptt.diagnosis.bias_check import BiasCheck, check_bias
from adaptive_tbptt.estimate.lag_profile import LagProfile
from adaptive_tbptt.estimate.measured_curve import losses_of
from adaptive_tbptt.estimate.truncation import TruncationDecision, choose_truncation
from adaptive_tbptt.measure.lag_probe import probe_segment
from adaptive_tbptt.measure.sampling import draw_segment
from adaptive_tbptt.model.losses import default_count
from adaptive_tbptt.model.recurrent import as_recurrent
from adaptive_tbptt.train.checkpoint import load, load_model
from adaptive_tbptt.train.files import read_rows
from adaptive_tbptt.truncate.parameter_gauges import MeasuredGauge

from ..config import GAUGES, TrainConfig

SKETCH = MeasuredGauge().sketch


@dataclass(frozen=True)
class RunCheck:
    """The check of a run at its best parameters.

    Attributes:
        epoch: that the parameters are of.
        delta: what was asked.
        truncated: the gradient truncated at the K in use there.
        windows: that of the training windows, of K2 losses each.
        gauges: for each gauge, what it says of that K, and which K it would choose.
        split: whose data it was.
    """

    epoch: int
    delta: float
    truncated: BiasCheck
    windows: BiasCheck
    gauges: dict[str, tuple[float, TruncationDecision]]
    split: str

    def __str__(self) -> str:
        rows = [("gauge", f"says of K={self.truncated.k}", f"K for {self.delta:g}", "outcome")]
        for name, (said, choice) in self.gauges.items():
            rows.append((name, f"{said:.3g}", str(choice.k), choice.outcome.value))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        table = [
            "  ".join([*(cell.rjust(w) for cell, w in zip(row, widths, strict=False)), row[3]])
            for row in rows
        ]
        return "\n".join(
            [
                *table,
                f"truncated at K, epoch {self.epoch}: {self.truncated}",
                f"training windows of {self.windows.losses} losses: {self.windows}",
                f"delta={self.delta:g} is {self.truncated.verdict(self.delta)}",
            ]
        )

    def record(self) -> dict[str, Any]:
        """Return the line that is kept in the run folder."""
        found = self.truncated
        measured = found.relative if found.high < float("inf") else None
        return {
            "epoch": self.epoch,
            "k": found.k,
            "delta": self.delta,
            "measured": measured,
            "low": found.low if measured is not None else None,
            "high": found.high if measured is not None else None,
            "samples": found.samples,
            "split": self.split,
            "window": found.lags,
            "verdict": found.verdict(self.delta),
        }


def check_run(
    config: TrainConfig,
    folder: Path,
    *,
    delta: float | None,
    k: int | None,
    split: str,
    segments: int,
    window: int | None = None,
) -> RunCheck:
    """Measure the bias at a run's best parameters, on segments of its data that are drawn anew.

    Args:
        config: of the run.
        folder: the run folder; the check is added to its `check_bias.jsonl`.
        delta: what was asked; None is the run's own.
        k: to check; None is the one in use at the best epoch.
        split: whose data; the promise is about the gradient of the training data.
        segments: random segments to compare gradients on.
        window: lags to compare with; None is the run's own window.
    """
    config = config.changed(lags=window)
    delta = config.delta if delta is None else delta
    if delta is None:
        raise ValueError("the run has a fixed K, so nothing was promised: give --delta")
    best = _best_epoch(folder)
    streams = config.streams()
    if split not in streams:
        raise ValueError(f"split must be one of {', '.join(streams)}; got {split!r}")
    path = folder / "checkpoints" / "best.safetensors"
    model = config.model()
    load_model(model, load(path), path)
    model.train()
    k = best["k"] if k is None else k
    losses = losses_of(config.window_losses, k)
    options: dict[str, Any] = {
        "window": config.window,
        "burn_in": config.burn_in,
        "segments": segments,
        "seed": config.seed + 1,
    }
    (truncated,) = check_bias(model, config.loss_fn, streams[split], k, **options)
    (windows,) = check_bias(
        model, config.loss_fn, streams[split], k, losses=losses, steps=losses, **options
    )
    profile = _profile(config, model, streams[split], max(2, segments // 2))
    found = {}
    for name in GAUGES:
        curve = config.changed(gauge=name).make_gauge().bias(profile)
        choice = choose_truncation(curve, delta=delta, k_min=config.k_min, k_max=config.k_max)
        found[name] = (curve.relative_at(k), choice)
    check = RunCheck(best["epoch"], delta, truncated, windows, found, split)
    with (folder / "check_bias.jsonl").open("a") as file:
        file.write(json.dumps(check.record()) + "\n")
    return check


def _best_epoch(folder: Path) -> dict[str, Any]:
    """Return the metrics of the epoch with the lowest validation loss."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{folder} holds no metrics: there is nothing to check")
    epochs = [r for r in read_rows(path) if r["event"] == "epoch" and r["valid_loss"] is not None]
    if not epochs:
        raise ValueError(f"{folder} has no finished epoch yet")
    found: dict[str, Any] = min(epochs, key=lambda row: row["valid_loss"])
    return found


def _profile(config: TrainConfig, model: Any, stream: Any, probes: int) -> LagProfile:
    """Probe as the gauges would, several times."""
    recurrent, count_losses = as_recurrent(model), default_count(config.loss_fn)
    generator = torch.Generator().manual_seed(config.seed + 2)
    profiles = []
    for _ in range(probes):
        segment = draw_segment(stream, config.burn_in + config.window, count_losses, generator)
        profiles.append(
            probe_segment(
                recurrent,
                config.loss_fn,
                segment,
                burn_in=config.burn_in,
                sketch=SKETCH,
            )
        )
    return LagProfile.concatenate(profiles)
