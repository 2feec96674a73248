"""`atbptt check-bias`: the relative bias that was asked for, what it is, what each gauge says."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from . import defaults
from .diagnosis import BiasCheck, Sampling
from .diagnosis.bias_check import GROUPS, SIZE, check_of, measure_levels
from .estimate import Curve, TruncationDecision, choose_truncation, levels_up_to
from .measure import LagRequest, LevelRequest
from .model import Objective
from .run_targets import RunTarget


@dataclass(frozen=True)
class TargetCheck:
    """The check of a model at its present parameters.

    Attributes:
        epoch: that the parameters are of; None if it is not known.
        delta: the relative bias that was asked for.
        truncated: the gradient truncated at K.
        windows: the gradient of the training windows, of K2 losses each.
        gauges: for each gauge, what it says of that K, and which K it would choose.
        split: the data it was measured on.
    """

    epoch: int | None
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
        when = "" if self.epoch is None else f", epoch {self.epoch}"
        return "\n".join(
            [
                *table,
                f"truncated at K{when}: {self.truncated}",
                f"training windows of {self.windows.losses} losses: {self.windows}",
                f"delta={self.delta:g} is {self.truncated.verdict(self.delta)}",
            ]
        )

    def record(self) -> dict[str, Any]:
        """Return the line that is kept in the run folder; `atbptt report` draws it."""
        found = self.truncated
        measured = found.relative if math.isfinite(found.high) else None
        return {
            "epoch": self.epoch,
            "k": found.k,
            "delta": self.delta,
            "measured": measured,
            "low": found.low if measured is not None else None,
            "high": found.high if measured is not None else None,
            "samples": found.samples,
            "split": self.split,
            "lags": found.lags,
            "verdict": found.verdict(self.delta),
        }


def check_target(
    target: RunTarget, *, split: str = "train", segments: int = defaults.CHECK_SEGMENTS
) -> TargetCheck:
    """Measure the bias at the target's K on segments of its data that are drawn anew.

    Args:
        target: with `k` and `delta`. If it has a folder, the check is added to the
            `check_bias.jsonl` there.
        split: whose data; the promise is about the gradient of the training data.
        segments: random segments to compare gradients on.
    """
    if target.k is None:
        raise ValueError("give --k, the truncation length to check: it is not known from a run")
    if target.delta is None:
        raise ValueError(
            "K was fixed, so no bias was promised: give --delta, the relative bias to hold the "
            "measurement against"
        )
    stream: Any = target.stream(split)
    losses = target.losses_per_window(target.k)
    if not 0 <= target.k < target.lags:
        raise ValueError(f"K={target.k} must be below the lags to compare with, {target.lags}")
    objective = Objective.of(target.model, target.loss_fn)
    contexts = levels_up_to(target.lags, target.k)
    sampling = Sampling(burn_in=target.burn_in, seed=target.seed + 1)
    single, several = (
        measure_levels(
            objective, stream, LevelRequest(contexts, n, segments, GROUPS, SIZE), sampling
        )
        for n in (1, losses)
    )
    sampling = Sampling(burn_in=target.burn_in, seed=target.seed + 2)
    request = LagRequest(target.lags, batches=max(2, segments // 2))
    profile = request.measure(sampling.source(objective, stream))
    k_max = target.lags if target.k_max is None else target.k_max
    found = {}
    curves: dict[str, Curve] = {n: gauge.bias(profile) for n, gauge in target.gauges.items()}
    for name, curve in (*curves.items(), ("measured", single)):
        choice = choose_truncation(curve, delta=target.delta, k_min=target.k_min, k_max=k_max)
        found[name] = (curve.relative_at(target.k), choice)
    checks = check_of(single, target.k), check_of(several, target.k)
    check = TargetCheck(target.epoch, target.delta, *checks, found, split)
    if target.folder is not None:
        with (target.folder / "check_bias.jsonl").open("a") as file:
            file.write(json.dumps(check.record()) + "\n")
    return check
