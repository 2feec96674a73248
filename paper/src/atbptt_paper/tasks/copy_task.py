"""The copy task of the paper: its configuration, presets, data and model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from adaptive_tbptt import SequenceStream

from ..config import DATA, MODEL, option
from .copy_data import copy_stream, copy_symbols, read_arrays
from .perplexity import PerplexityConfig
from .sequence_model import LAYERS, SymbolModel, seeded


@dataclass(frozen=True, kw_only=True)
class CopyConfig(PerplexityConfig):
    """Hyperparameters of the copy task."""

    task: ClassVar[str] = "copy"

    m: int = option(10, "symbols to remember; with --m-min, the largest number")
    m_min: int | None = option(None, "smallest number of symbols; drawn uniformly up to --m", DATA)
    layout: str = option(
        "released",
        "layout: released (marker first) or paper (marker before recall)",
        DATA,
        ("released", "paper"),
    )
    data_symbols: int = option(4, "number of data symbols (I)", DATA)
    train_steps: int = option(4000, "length of each training row", DATA)
    valid_steps: int = option(1000, "length of each validation and test row", DATA)
    data_seed: int = option(0, "seed of the generated symbols", DATA)
    data: str | None = option(
        None, "an .npz file with arrays to use instead; rows and steps are its", DATA
    )
    hidden: int = option(50, "units of each layer", MODEL)
    layers: int = option(2, "recurrent layers", MODEL)
    cell: str = option("lstm", "kind of layer: lstm, gru or rnn", MODEL, LAYERS)
    encoder: str = option(
        "linear",
        "input layer: linear (release) or embedding (the paper's text)",
        MODEL,
        ("linear", "embedding"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.m < 1:
            raise ValueError(f"m must be at least 1 symbol, got {self.m}")
        if self.m_min is not None and not 1 <= self.m_min <= self.m:
            raise ValueError(f"m_min must be in [1, {self.m}], got {self.m_min}")
        if self.delta is not None and self.train_steps < self.burn_in + self.lags:
            raise ValueError(
                f"a probe of {self.burn_in} + {self.lags} steps does not fit into rows of "
                f"{self.train_steps}"
            )

    def streams(self) -> dict[str, SequenceStream]:
        """Return the training, validation and test streams."""
        if self.data is not None:
            arrays = read_arrays(Path(self.data))
            largest = max(int(part.max()) for split in arrays.values() for part in split)
            if largest > self.data_symbols + 1:
                raise ValueError(
                    f"{self.data} holds the symbol {largest}: with blank and marker, that needs "
                    f"--data-symbols {largest - 1}, got {self.data_symbols}"
                )
            return {name: copy_stream(s) for name, s in arrays.items()}
        lengths = {"train": self.train_steps, "valid": self.valid_steps, "test": self.valid_steps}
        memory = (self.m if self.m_min is None else self.m_min, self.m)
        layout: Any = self.layout
        return {
            name: copy_stream(
                copy_symbols(
                    steps,
                    self.batch,
                    memory,
                    layout=layout,
                    data_symbols=self.data_symbols,
                    seed=3 * self.data_seed + i,
                )
            )
            for i, (name, steps) in enumerate(lengths.items())
        }

    def model(self) -> SymbolModel:
        """Return the model with the parameters that `seed` gives."""
        cell: Any = self.cell
        encoder: Any = self.encoder
        model: SymbolModel = seeded(
            self.seed,
            lambda: SymbolModel(self.data_symbols + 2, self.hidden, self.layers, cell, encoder),
        )
        return model


# The authors' release: tau at 0.8 of the lags, weight decay 1e-5, clipping at 1 / K2.
_PAPER = CopyConfig(tau=0.8, weight_decay=1e-5)


PRESETS: dict[str, CopyConfig] = {
    "paper": _PAPER,
    "paper-variable": _PAPER.changed(m_min=5),
    "paper-text": _PAPER.changed(layout="paper", data_symbols=6, encoder="embedding"),
    "quick": CopyConfig(
        m=6,
        train_steps=2000,
        valid_steps=500,
        hidden=40,
        layers=1,
        epochs=40,
        lags=50,
        k_max=50,
        k_init=10,
        tau=0.8,
    ),
}
