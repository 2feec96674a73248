"""The recurrent marked temporal point process of Du et al. (KDD 2016), as in the supplement."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adaptive_tbptt import SequenceStream, evaluate
from adaptive_tbptt.model import LossFn, Recurrent

from ..config import DATA, MODEL, TrainConfig, option
from .intensity import expected_gap, time_nll
from .point_data import Sequence, point_stream, read_sequences
from .point_release import STRETCH, WARM_UP, integral_to
from .sequence_model import LAYERS, recurrent_layer, release_init, seeded


class Forecast(NamedTuple):
    """What the model says of the next event: `(time, batch, types)` logits, and its intensity."""

    logits: Tensor
    a: Tensor
    w: Tensor


class PointModel(nn.Module):
    """Embedded type and [is first, gap] in; logits of the next type and its intensity out.

    Args:
        types: number of event types.
        hidden: dimension of the embedding and of every layer.
        layers: number of layers.
        cell: 'lstm', 'gru' or 'rnn'.
    """

    def __init__(self, types: int, hidden: int = 128, layers: int = 2, cell: str = "lstm") -> None:
        super().__init__()
        self.embedding = nn.Embedding(types, hidden)
        self.recurrent = recurrent_layer(cell, hidden + 2, hidden, layers)
        self.type_head = nn.Linear(hidden, types)
        self.time_head = nn.Linear(hidden, 1)
        self.slope = nn.Parameter(torch.zeros(1))
        release_init(self)

    def core(self, inputs: dict[str, Tensor], state: Any) -> tuple[Tensor, Any]:
        """Carry the state over events."""
        embedded = self.embedding(inputs["type"])
        times = torch.stack([inputs["first"], inputs["gap"]], dim=-1).to(embedded.dtype)
        features, state = self.recurrent(torch.cat([embedded, times], dim=-1), state)
        return features, state

    def head(self, features: Tensor) -> Forecast:
        """Read out type and intensity."""
        return Forecast(self.type_head(features), self.time_head(features)[..., 0], self.slope)

    def forward(self, inputs: dict[str, Tensor], state: Any = None) -> tuple[Forecast, Any]:
        """Return forecast and state."""
        features, state = self.core(inputs, state)
        return self.head(features), state


def type_nll(forecast: Forecast, targets: dict[str, Tensor]) -> Tensor:
    """Negative log-likelihood of the next event's type, the mean over time and batch."""
    return F.cross_entropy(forecast.logits.flatten(0, -2), targets["type"].flatten())


def gap_nll(forecast: Forecast, targets: dict[str, Tensor]) -> Tensor:
    """Negative log-likelihood of the time until the next event, the mean over time and batch."""
    gap = targets["gap"].to(forecast.a.dtype)
    return time_nll(forecast.a, forecast.w, gap).mean()


def point_loss(forecast: Forecast, targets: dict[str, Tensor]) -> Tensor:
    """Negative log-likelihood per event."""
    return type_nll(forecast, targets) + gap_nll(forecast, targets)


def type_error(forecast: Forecast, targets: dict[str, Tensor]) -> Tensor:
    """Fraction of events whose type is not the likeliest one."""
    return (forecast.logits.argmax(-1) != targets["type"]).cpu().double().mean()


def squared_gap_error(forecast: Forecast, targets: dict[str, Tensor]) -> Tensor:
    """Mean squared error of the expected time until the next event."""
    error = expected_gap(forecast.a, forecast.w) - targets["gap"].cpu().double()
    return error.square().mean()


def median_gap_error(model: nn.Module | Recurrent, stream: SequenceStream) -> float:
    """Return the median error of the expected time until the next event."""
    newest = torch.zeros(1)

    def keep(forecast: Forecast, targets: dict[str, Tensor]) -> Tensor:
        nonlocal newest
        newest = (expected_gap(forecast.a, forecast.w) - targets["gap"].cpu().double()).abs()
        return newest.mean()

    evaluate(model, keep, stream, chunk=len(stream))  # the split in one piece
    return float(newest.median())


def release_rmse(forecast: Forecast, targets: dict[str, Tensor]) -> Tensor:
    """Root mean squared error of the release's expected time; of a whole split."""
    gap = targets["gap"].cpu().double()
    error = integral_to(float(gap.max()), forecast.a, forecast.w) - gap
    return error.square().mean().sqrt()


def release_metrics(
    model: nn.Module | Recurrent, stream: SequenceStream, chunk: int
) -> dict[str, float]:
    """Return what the release would say of a split: see `point_release`."""
    steps = len(stream)
    counted, whole = (stream.segment(0, n) for n in (steps // STRETCH * STRETCH, steps))
    first = SequenceStream(counted.inputs, counted.targets, counted.resets)
    warm = SequenceStream(whole.inputs, whole.targets, whole.resets, burn_in=WARM_UP)
    return {
        "release_nll": evaluate(model, point_loss, first, chunk=chunk) * len(first) / steps,
        "release_rmse": evaluate(model, release_rmse, warm, chunk=steps),
    }


def point_metrics(
    model: nn.Module | Recurrent, stream: SequenceStream, chunk: int = 256
) -> dict[str, float]:
    """Return NLL with its two terms, errors of the expected time, and 0-1 loss of the type.

    Each is evaluated as a loss is, in a pass of its own.

    Args:
        model: a `PointModel`.
        stream: the split.
        chunk: steps evaluated at a time.
    """

    def mean(loss: LossFn) -> float:
        return evaluate(model, loss, stream, chunk=chunk)

    of_type, of_time = mean(type_nll), mean(gap_nll)
    return {
        "nll": of_type + of_time,
        "type_nll": of_type,
        "time_nll": of_time,
        "rmse": math.sqrt(mean(squared_gap_error)),
        "zero_one": mean(type_error),
        "median_error": median_gap_error(model, stream),
        **(release_metrics(model, stream, chunk) if len(stream) >= STRETCH else {}),
    }


@dataclass(frozen=True, kw_only=True)
class PointConfig(TrainConfig):
    """Hyperparameters of the point process."""

    task: ClassVar[str] = "point-process"
    score: ClassVar[str] = "nll"

    data: str | None = option(None, "folder with event-N-SPLIT.txt and time-N-SPLIT.txt")
    number: int = option(1, "number N in the names of the files", DATA)
    time_scale: float = option(1.0, "unit of time: gaps are multiplied by it", DATA)
    resets: bool = option(True, "return to the initial state where a sequence begins", DATA)
    train_sequences: int | None = option(None, "use only the first so many to train", DATA)
    hidden: int = option(128, "dimension of embedding and state", MODEL)
    layers: int = option(2, "recurrent layers", MODEL)
    cell: str = option("lstm", "kind of layer: lstm, gru or rnn", MODEL, LAYERS)

    def sequences(self) -> dict[str, list[Sequence]]:
        """Read the files; validation is the first half of the test split."""
        if self.data is None:
            raise ValueError(
                "--data is needed: a folder with event-1-train.txt, time-1-train.txt, and the same "
                "for test"
            )
        train = read_sequences(Path(self.data), "train", self.number)[: self.train_sequences]
        test = read_sequences(Path(self.data), "test", self.number)
        half = len(test) // 2
        if half == 0:
            raise ValueError("the test split needs two sequences: its first half is validation")
        return {"train": train, "valid": test[:half], "test": test[half:]}

    def streams(self) -> dict[str, SequenceStream]:
        """Return the training, validation and test streams."""
        return {
            split: point_stream(found, self.batch, scale=self.time_scale, resets=self.resets)
            for split, found in self.sequences().items()
        }

    def model(self) -> PointModel:
        """Return the model with the parameters that `seed` gives."""
        found = self.sequences()
        types = 1 + max(int(s.types.max()) for split in found.values() for s in split)
        model: PointModel = seeded(
            self.seed, lambda: PointModel(types, self.hidden, self.layers, self.cell)
        )
        return model

    @property
    def loss_fn(self) -> Any:
        """Negative log-likelihood."""
        return point_loss

    def valid_metrics(self, loss: float) -> dict[str, float]:
        """Name the validation loss."""
        return {"valid_nll": loss}

    def test_metrics(self, trainer: Any, test: SequenceStream) -> dict[str, float]:
        """Return everything that is said of the test split."""
        found = point_metrics(trainer.tbptt.recurrent, test, self.eval_chunk)
        return {f"test_{name}": value for name, value in found.items()}


# The release: sequences concatenated without resets, weight decay 1e-3, K_min = 2 (the paper: 1),
# sqrt(K) scaling for adaptive K alone.
_PAPER = PointConfig(
    lr=0.1,
    batch=64,
    epochs=51,
    weight_decay=1e-3,
    lags=200,
    k_init=6,
    k_min=1,
    k_max=100,
    resets=False,
    plain_fixed=True,
)


PRESETS: dict[str, PointConfig] = {
    "book-order": _PAPER,
    "sequence-wise": _PAPER.changed(resets=True, plain_fixed=False),
    "quick": _PAPER.changed(
        hidden=32, layers=1, batch=16, epochs=5, train_sequences=10, lags=50, burn_in=10, k_max=50
    ),
}
