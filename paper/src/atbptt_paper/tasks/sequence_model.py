"""The model all symbol tasks share: encoder, recurrent layers, linear readout."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CellName = Literal["lstm", "gru", "rnn"]


LAYERS: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


def recurrent_layer(cell: str, inputs: int, hidden: int, layers: int, dropout: float = 0.0) -> Any:
    """Return `nn.LSTM`, `nn.GRU` or `nn.RNN`; dropout acts between layers."""
    if cell not in LAYERS:
        raise ValueError(f"cell must be one of {', '.join(LAYERS)}; got {cell!r}")
    return LAYERS[cell](inputs, hidden, layers, dropout=dropout if layers > 1 else 0.0)


def release_init(module: nn.Module) -> None:
    """Initialise as the authors' release: matrices uniform in +-sqrt(3 / max(shape)), vectors 0."""
    for parameter in module.parameters():
        if parameter.dim() < 2:
            nn.init.zeros_(parameter)
        else:
            bound = math.sqrt(3.0 / max(parameter.shape))
            nn.init.uniform_(parameter, -bound, bound)


class SymbolModel(nn.Module):
    """Symbols in, logits out.

    Args:
        symbols: size of the alphabet.
        hidden: units of each recurrent layer.
        layers: number of layers.
        cell: 'lstm', 'gru' or 'rnn'.
        encoder: 'linear' maps one-hot symbols to `hidden` units, as the release does; 'embedding'
            embeds them in as many dimensions as there are symbols, as the paper's text says.
    """

    def __init__(
        self,
        symbols: int,
        hidden: int = 50,
        layers: int = 2,
        cell: CellName = "lstm",
        encoder: Literal["linear", "embedding"] = "linear",
    ) -> None:
        super().__init__()
        if encoder not in ("linear", "embedding"):
            raise ValueError(f"encoder must be 'linear' or 'embedding', got {encoder!r}")
        self.symbols = symbols
        linear = encoder == "linear"
        self.encoder: nn.Module = (
            nn.Linear(symbols, hidden) if linear else nn.Embedding(symbols, symbols)
        )
        self.recurrent = recurrent_layer(cell, hidden if linear else symbols, hidden, layers)
        self.readout = nn.Linear(hidden, symbols)
        release_init(self)

    def core(self, inputs: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Carry the state over `(time, batch)` symbols."""
        if isinstance(self.encoder, nn.Linear):
            # The product with a one-hot vector is a column of the matrix.
            encoded = F.embedding(inputs.long(), self.encoder.weight.t()) + self.encoder.bias
        else:
            encoded = self.encoder(inputs.long())
        features, state = self.recurrent(encoded, state)
        return features, state

    def head(self, features: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.readout(features)
        return logits

    def forward(self, inputs: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return logits and state."""
        features, state = self.core(inputs, state)
        return self.head(features), state


def symbol_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, the mean over time and batch; its exponential is the perplexity."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten().long())


def perplexity(loss: float) -> float:
    """exp(loss), infinite rather than an error where it overflows."""
    return math.exp(loss) if loss < 700.0 else math.inf


def count_parameters(module: nn.Module) -> int:
    """Number of trainable numbers; tied ones count once."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def seeded(seed: int, build: Any) -> Any:
    """Build a module from a seed of its own, without disturbing the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()
