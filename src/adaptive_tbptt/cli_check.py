"""`atbptt check-bias`: compare delta with the measured bias and with what each gauge says."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .diagnosis import BiasCheck, Sampling
from .diagnosis.bias_check import check_of, measure_levels
from .diagnosis.diagnosis_result import aligned
from .estimate import Curve, TruncationDecision, choose_truncation, levels_up_to
from .measure import LagRequest
from .model import Objective
from .run_targets import RunTarget
from .train.files import append_line


@dataclass(frozen=True)
class TargetCheck:
    """The check of a model at its present parameters.

    Attributes:
        epoch: the epoch of the parameters; None if unknown.
        delta: the tolerated relative bias.
        truncated: the gradient truncated at K.
        windows: the gradient of the training windows, of K2 losses each.
        gauges: for each gauge, the bias it gives for that K, and the K it would choose.
        split: the data measured on.
    """

    epoch: int | None
    delta: float
    truncated: BiasCheck
    windows: BiasCheck
    gauges: dict[str, tuple[float, TruncationDecision]]
    split: str

    def __str__(self) -> str:
        table = [["gauge", f"says of K={self.truncated.k}", f"K for {self.delta:g}", "outcome"]]
        for name, (said, choice) in self.gauges.items():
            table.append([name, f"{said:.3g}", str(choice.k), choice.outcome.value])
        when = "" if self.epoch is None else f", epoch {self.epoch}"
        return "\n".join(
            [
                *aligned(table),
                f"truncated at K{when}: {self.truncated}",
                f"training windows of {self.windows.losses} losses: {self.windows}",
                f"delta={self.delta:g} is {self.truncated.verdict(self.delta)}",
            ]
        )

    def record(self) -> dict[str, Any]:
        """Return the line for the run folder; `atbptt report` draws it."""
        found = self.truncated
        known = math.isfinite(found.high)
        return {
            "epoch": self.epoch,
            "k": found.k,
            "delta": self.delta,
            "measured": found.relative if known else None,
            "low": found.low if known else None,
            "high": found.high if known else None,
            "samples": found.samples,
            "split": self.split,
            "lags": found.lags,
            "verdict": found.verdict(self.delta),
        }

    def keep(self, folder: Path) -> None:
        """Add the check to the `check_bias.jsonl` of a run folder."""
        path = folder / "check_bias.jsonl"
        try:
            append_line(path, json.dumps(self.record()))
        except OSError as error:
            raise OSError(
                f"the check above is not in {path}, so a report will not show it: {error}"
            ) from error


def check_target(target: RunTarget, *, split: str, segments: int) -> TargetCheck:
    """Measure the bias at the target's K on newly drawn segments of its data.

    Args:
        target: with `k` and `delta`.
        split: whose data; the promise is about the gradient of the training data.
        segments: random segments to compare gradients on.
    """
    k, delta = target.k, target.delta
    if k is None:
        raise ValueError("give --k, the truncation length to check: no run says which it is")
    if delta is None:
        raise ValueError(
            "K was fixed, so no bias was promised: give --delta, the relative bias to compare the "
            "measurement with"
        )
    stream = target.stream(split)
    if not 0 <= k < target.lags:
        raise ValueError(f"K={k} must be below the lags to compare with, {target.lags}")
    objective = Objective.of(target.model, target.loss_fn)
    contexts = levels_up_to(target.lags, k)
    sampling = Sampling(burn_in=target.burn_in, seed=target.seed + 1)
    single, several = (
        measure_levels(objective, stream, contexts, losses, segments, sampling)
        for losses in (1, target.losses_per_window(k))
    )
    sampling = Sampling(burn_in=target.burn_in, seed=target.seed + 2)
    request = LagRequest(target.lags, batches=max(2, segments // 2))
    profile = request.measure(sampling.source(objective, stream))
    curves: dict[str, Curve] = {n: gauge.bias(profile) for n, gauge in target.gauges.items()}
    curves["measured"] = single
    k_max = target.lags if target.k_max is None else target.k_max
    gauges = {}
    for name, curve in curves.items():
        choice = choose_truncation(curve, delta=delta, k_min=target.k_min, k_max=k_max)
        gauges[name] = (curve.relative_at(k), choice)
    checks = check_of(single, k), check_of(several, k)
    return TargetCheck(target.epoch, delta, *checks, gauges, split)
