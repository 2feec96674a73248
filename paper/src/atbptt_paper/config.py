"""What a run is made of: every hyperparameter with its help text, presets, TOML in and out."""

from __future__ import annotations

import dataclasses
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from torch import nn

from adaptive_tbptt import AdaptiveTBPTT, BiasTolerance, FixedTruncation, SequenceStream, Trainer
from adaptive_tbptt.errors import unknown_name
from adaptive_tbptt.loop import Clip
from adaptive_tbptt.model import LossFn
from adaptive_tbptt.train import read_toml
from adaptive_tbptt.truncate import (
    Controller,
    Gauge,
    MeasuredGauge,
    PaperGauge,
    RateLimited,
    ReleaseGauge,
    StateGauge,
)

GAUGES: dict[str, type[Gauge]] = {
    "paper": PaperGauge,
    "release": ReleaseGauge,
    "measured": MeasuredGauge,
}
OPTIMIZERS = ("sgd", "adadelta", "adam")
STEP_SCALES = ("sqrt", "linear", "none")
RETIRED = ("parameter",)  # gauges of finished cells that can be read and no longer be trained with


# Groups of options on the command line, in this order. An option without a group is a common one.
GROUPS = (TRUNCATION, OPTIMISER, DATA, MODEL, RUN) = (
    "Truncation",
    "Optimiser",
    "Data",
    "Model",
    "Run",
)


def option(default: Any, text: str, group: str | None = None, choices: Iterable[str] = ()) -> Any:
    """Declare a field with its help text, its group and the values that it may have."""
    return field(
        default=default, metadata={"help": text, "group": group, "choices": tuple(choices)}
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ABC):
    """What every task has in common. A run sets exactly one of `delta`, `k` and `recommended`."""

    task: ClassVar[str]
    score: ClassVar[str]  # validation and test metrics are called valid_SCORE and test_SCORE

    delta: float | None = option(None, "tolerated relative bias of the gradient, in (0, 1)")
    k: int | None = option(None, "fixed truncation length, instead of --delta")
    recommended: bool = option(
        False, "train as the library recommends, instead of --delta or --k", TRUNCATION
    )
    name: str | None = option(None, "what tables call the run; K=... or delta=... by default", RUN)
    epochs: int = option(210, "passes over the training data")
    seed: int = option(0, "seed of the initial parameters and of the probes")
    lr: float = option(1.0, "learning rate, before it is scaled with K")
    step_scale: str = option(
        "sqrt", "scale the rate with K2: sqrt, linear or none", OPTIMISER, STEP_SCALES
    )
    plain_fixed: bool = option(False, "do not scale the rate where K is fixed", OPTIMISER)
    optimizer: str = option("sgd", "optimiser: sgd, adadelta or adam", OPTIMISER, OPTIMIZERS)
    momentum: float = option(0.0, "momentum of sgd", OPTIMISER)
    lr_decay: float = option(1.0, "factor on the learning rate after every epoch", OPTIMISER)
    weight_decay: float = option(0.0, "L2 penalty", OPTIMISER)
    clip: float = option(
        1.0, "gradient norm above which it is clipped, divided by K2; 0 is off", OPTIMISER
    )
    losses_per_k: float = option(1.0, "losses per window (K2), as a multiple of K", TRUNCATION)
    losses: int | None = option(
        None, "losses per window (K2) in steps, instead of --losses-per-k", TRUNCATION
    )
    lags: int = option(100, "lags that a probe measures (R)", TRUNCATION)
    k_init: int = option(15, "K until the first estimate (K_0)", TRUNCATION)
    estimate_first: bool = option(
        False, "estimate K before the first update, instead of starting with K_0", TRUNCATION
    )
    k_min: int = option(2, "smallest K to choose", TRUNCATION)
    k_max: int = option(100, "largest K to choose", TRUNCATION)
    k_fall: float | None = option(
        None, "K falls by at most this factor from estimate to estimate", TRUNCATION
    )
    gauge: str = option(
        "release", "how to estimate the bias: release, paper or measured", TRUNCATION, GAUGES
    )
    tau: float = option(
        0.9, "from which fraction of the lags release and paper fit the decay", TRUNCATION
    )
    estimates_per_epoch: float = option(1.0, "estimates of K per epoch (alpha)", TRUNCATION)
    burn_in: int = option(20, "steps that warm up the state before a probe", TRUNCATION)
    batch: int = option(64, "batch size, in rows (S)", DATA)
    eval_chunk: int = option(256, "steps evaluated at a time", RUN)
    error_bar_every: int = option(0, "repeat the estimate every so many epochs; 0 is never", RUN)
    error_bar_repeats: int = option(20, "number of those repeats", RUN)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value, allowed = getattr(self, f.name), f.metadata["choices"]
            if allowed and value not in (*allowed, *(RETIRED if f.name == "gauge" else ())):
                raise ValueError(f"{f.name} must be one of {', '.join(allowed)}; got {value!r}")
        for name in ("epochs", "batch", "eval_chunk", "lags", "hidden", "layers", "losses", "k",
                     "train_sequences"):  # fmt: skip
            count = getattr(self, name, None)
            if count is not None and count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        for name in ("lr", "lr_decay", "time_scale", "losses_per_k", "estimates_per_epoch"):
            if not getattr(self, name, 1.0) > 0.0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0.0 <= self.tau < 1.0:
            raise ValueError(f"tau must be a fraction in [0, 1) of the lags, got {self.tau}")
        for name in ("clip", "seed", "error_bar_every", "burn_in", "weight_decay", "momentum"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if (self.delta is not None or self.k is not None) and self.gauge not in RETIRED:
            self.controller()

    @abstractmethod
    def streams(self) -> dict[str, SequenceStream]:
        """Return the training, validation and test streams."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Return the model with the parameters that `seed` gives."""

    @property
    @abstractmethod
    def loss_fn(self) -> LossFn:
        """The loss, a mean over time and batch."""

    @abstractmethod
    def valid_metrics(self, loss: float) -> dict[str, float]:
        """Return `valid_...` metrics for a validation loss."""

    @abstractmethod
    def test_metrics(self, trainer: Trainer, test: SequenceStream) -> dict[str, float]:
        """Return `test_...` metrics of the present parameters."""

    @property
    def rate_rule(self) -> Literal["sqrt", "linear", "none"]:
        """How the learning rate is scaled with K2."""
        rule: Any = "none" if self.plain_fixed and self.k is not None else self.step_scale
        return rule

    def require_one_way(self) -> None:
        """Refuse none, and more than one, of the three ways to choose K."""
        if (self.delta is not None) + (self.k is not None) + self.recommended != 1:
            raise ValueError(
                "give exactly one of --delta (tolerated bias, K follows), --k (fixed) and "
                "--recommended"
            )

    def controller(self) -> Controller:
        """Return the controller that `delta` or `k` asks for."""
        self.require_one_way()
        if self.k is not None:
            return FixedTruncation(self.k)
        assert self.delta is not None
        rule = BiasTolerance(
            delta=self.delta,
            k_min=self.k_min,
            k_max=self.k_max,
            lags=self.lags,
            k_init=None if self.estimate_first else self.k_init,
            gauge=self.make_gauge(),
        )
        return rule if self.k_fall is None else RateLimited(rule, math.inf, self.k_fall)

    def make_gauge(self) -> Gauge:
        """Return the gauge with its settings."""
        if self.gauge in RETIRED:
            raise ValueError(
                f"gauge {self.gauge!r} was retired: it asked for k_max nearly everywhere. Its "
                "finished cells can be read; train with 'measured' instead"
            )
        kind = GAUGES[self.gauge]
        return kind(tau=self.tau) if kind in (PaperGauge, ReleaseGauge) else kind()

    def state_gauge(self) -> StateGauge:
        """Return the gauge that a diagnosis of the decay reads: the run's, or the release's."""
        kind = GAUGES.get(self.gauge, ReleaseGauge)
        return PaperGauge(tau=self.tau) if kind is PaperGauge else ReleaseGauge(tau=self.tau)

    def make_tbptt(self, model: nn.Module) -> AdaptiveTBPTT:
        """Return the loop that trains `model` as this configuration says."""
        if self.recommended:
            self.require_one_way()
            return AdaptiveTBPTT(
                model, self.loss_fn, losses=self.losses, burn_in=self.burn_in, seed=self.seed
            )
        steps: dict[str, Any] = {"losses_per_k": self.losses_per_k}
        if self.losses is not None:
            steps = {"losses": self.losses}
        return AdaptiveTBPTT(
            model,
            self.loss_fn,
            self.controller(),
            **steps,
            estimates_per_epoch=self.estimates_per_epoch,
            burn_in=self.burn_in,
            seed=self.seed,
        )

    def make_clip(self) -> Clip | None:
        """Return the clipping of the release, or none."""
        return Clip(self.clip, per_loss=True) if self.clip > 0.0 else None

    @property
    def setting(self) -> str:
        """The row of a table this run belongs to, such as K=10 or delta=0.1."""
        if self.name is not None:
            return self.name
        if self.recommended:
            return "recommended"
        return f"K={self.k}" if self.k is not None else f"delta={self.delta:g}"

    def changed(self, **values: Any) -> Self:
        """Return a copy with some values replaced; None leaves a value as it is."""
        given = {name: value for name, value in values.items() if value is not None}
        if given.get("recommended"):
            given |= {"delta": None, "k": None}
        elif given.get("k") is not None:
            given = {"delta": None, "recommended": False} | given
        elif given.get("delta") is not None:
            given = {"k": None, "recommended": False} | given
        return dataclasses.replace(self, **given)

    def to_toml(self) -> str:
        """Return every value as a line of TOML, with its help text; unset ones are left out."""
        lines = []
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value is not None:
                lines.append(f"# {f.metadata['help']}\n{f.name} = {_toml(value)}\n")
        return "\n".join(lines)

    @classmethod
    def from_toml(cls, path: Path) -> Self:
        """Read what `to_toml` wrote, today or before the settings were renamed."""
        values = present_names(read_toml(path))
        values.pop("task", None)
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(values.keys() - known)
        if unknown:
            raise ValueError(f"{path} has settings that are not known: {', '.join(unknown)}")
        try:
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} cannot be used: {error}") from error

    def difference(self, other: TrainConfig) -> list[str]:
        """Return a line for every value in which two configurations differ."""
        return [
            f"{f.name}: {getattr(self, f.name)} there, {getattr(other, f.name)} here"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]


def present_names(values: dict[str, Any]) -> dict[str, Any]:
    """Rename the settings that older configurations and cells call otherwise.

    `window` became `lags`. `losses` was the multiple of K that is `losses_per_k` now, and `k2` the
    number of steps that is `losses` now. So the meaning of `losses` depends on when it was written:
    a whole configuration has either a `window` or `lags`, and the old `losses` was a float.

    >>> present_names({"window": 100, "losses": 1.0, "k2": 10})
    {'lags': 100, 'losses_per_k': 1.0, 'losses': 10}
    >>> present_names({"lags": 100, "losses": 10})
    {'lags': 100, 'losses': 10}
    """
    if "lags" in values or "losses_per_k" in values:
        return values
    if "window" in values or "k2" in values or isinstance(values.get("losses"), float):
        new = {"window": "lags", "losses": "losses_per_k", "k2": "losses"}
        return {new.get(name, name): value for name, value in values.items()}
    return values


def _toml(value: Any) -> str:
    """Write a value as TOML, which is JSON but for numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def preset_of(presets: Mapping[str, Any], name: str) -> Any:
    """Return the configuration of that name."""
    if name not in presets:
        raise unknown_name(name, presets, "preset")
    return presets[name]
