"""Language modelling as in the paper: next word, tied embedding, one LSTM layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adaptive_tbptt import SequenceStream

from ..config import DATA, MODEL, option
from .corpus import SOURCES, Corpus, read_corpus
from .perplexity import PerplexityConfig
from .sequence_model import LAYERS, recurrent_layer, release_init, seeded


class LanguageModel(nn.Module):
    """Embedding, recurrent layers, linear output.

    Args:
        words: size of the vocabulary.
        hidden: dimension of the embedding and of every layer.
        layers: number of layers.
        cell: 'lstm', 'gru' or 'rnn'.
        dropout: on the embedding, between layers and on the output.
        tied: whether the output matrix is the embedding.
    """

    def __init__(
        self,
        words: int,
        hidden: int = 900,
        layers: int = 1,
        cell: str = "lstm",
        dropout: float = 0.2,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.recurrent = recurrent_layer(cell, hidden, hidden, layers, dropout)
        self.readout = nn.Linear(hidden, words)
        self.drop = nn.Dropout(dropout)
        if tied:
            self.readout.weight = self.embedding.weight
        release_init(self)

    def core(self, inputs: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Carry the state over `(time, batch)` tokens."""
        features, state = self.recurrent(self.drop(self.embedding(inputs.long())), state)
        return features, state

    def head(self, features: Tensor) -> Tensor:
        """Return logits; the costly part, so it runs only where there are losses."""
        logits: Tensor = self.readout(self.drop(features))
        return logits

    def forward(self, inputs: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return logits and state."""
        features, state = self.core(inputs, state)
        return self.head(features), state


def language_stream(tokens: NDArray[np.int32], rows: int, name: str = "the text") -> SequenceStream:
    """Cut tokens into contiguous rows; every token is to predict the next. Nothing is copied."""
    steps = (len(tokens) - 1) // rows
    if steps < 1:
        raise ValueError(f"{name} has {len(tokens)} tokens: too few for {rows} rows")
    used = torch.from_numpy(tokens[: steps * rows + 1])
    inputs, targets = used[:-1].view(rows, steps), used[1:].view(rows, steps)
    return SequenceStream(inputs, targets, batch_first=True)


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(PerplexityConfig):
    """Hyperparameters of language modelling."""

    task: ClassVar[str] = "language"

    data: str | None = option(None, "folder with train.txt, valid.txt and test.txt")
    dataset: str = option(
        "text",
        "what --data holds: ptb or wikitext-2, whose tokens are counted, or any text",
        DATA,
        ("text", *SOURCES),
    )
    partial: bool = option(False, "accept a data set whose splits are incomplete", DATA)
    level: str = option("word", "tokens: word or char", DATA, ("word", "char"))
    vocabulary: str = option(
        "train",
        "words: those of train (others are unknown) or of all splits",
        DATA,
        ("train", "all"),
    )
    train_tokens: int | None = option(None, "use only the first so many tokens to train", DATA)
    valid_tokens: int | None = option(
        None, "use only the first so many of valid and test each", DATA
    )
    cache: str = option("runs/cache", "where encoded text is kept", DATA)
    hidden: int = option(900, "dimension of embedding and state", MODEL)
    layers: int = option(1, "recurrent layers", MODEL)
    cell: str = option("lstm", "kind of layer: lstm, gru or rnn", MODEL, LAYERS)
    dropout: float = option(0.2, "dropout on embedding and output, and between layers", MODEL)
    tied: bool = option(True, "use the embedding as the output matrix", MODEL)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")

    def corpus(self) -> Corpus:
        """Read the text, or its cache."""
        if self.data is None:
            source = SOURCES.get(self.dataset)
            hint = "" if source is None else f" It comes from {source.origin}."
            raise ValueError(
                f"--data is needed: a folder with train.txt, valid.txt and test.txt.{hint}"
            )
        limits = {"train": self.train_tokens, "valid": self.valid_tokens, "test": self.valid_tokens}
        level: Any = self.level
        scope: Any = self.vocabulary
        return read_corpus(
            self.data,
            self.cache,
            level=level,
            scope=scope,
            limits={split: n for split, n in limits.items() if n is not None},
            dataset=self.dataset,
            partial=self.partial,
        )

    def streams(self) -> dict[str, SequenceStream]:
        """Return the training, validation and test streams."""
        return {
            split: language_stream(tokens, self.batch, f"the {split} split")
            for split, tokens in self.corpus().tokens.items()
        }

    def model(self) -> LanguageModel:
        """Return the model with the parameters that `seed` gives."""
        words = len(self.corpus().words)
        model: LanguageModel = seeded(
            self.seed,
            lambda: LanguageModel(
                words, self.hidden, self.layers, self.cell, self.dropout, self.tied
            ),
        )
        return model


# The paper's numbers, and from the release what it leaves out: weight decay 1e-7, burn-in 40,
# clipping at 1 / K2, the vocabulary over all splits. The release has K_max = 300 for both and a
# batch of 16 for WikiText-2; here the paper's 400 and 32 stand.
_PTB = LanguageConfig(
    dataset="ptb",
    hidden=900,
    batch=32,
    lr=10.0,
    epochs=50,
    weight_decay=1e-7,
    lags=400,
    k_init=100,
    k_min=10,
    k_max=400,
    burn_in=40,
    eval_chunk=64,
    vocabulary="all",
)


_SMALL: dict[str, Any] = {
    "hidden": 128,
    "batch": 16,
    "epochs": 30,
    "train_tokens": 160_001,
    "valid_tokens": 32_001,
    "vocabulary": "train",
}


PRESETS: dict[str, LanguageConfig] = {
    "ptb": _PTB,
    "wikitext-2": _PTB.changed(dataset="wikitext-2", hidden=512, step_scale="linear"),
    "ptb-small": _PTB.changed(**_SMALL),
    "wikitext-2-small": _PTB.changed(dataset="wikitext-2", **_SMALL),
}
