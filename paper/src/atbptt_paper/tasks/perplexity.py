"""Tasks whose loss is a cross entropy over symbols, reported as perplexity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from adaptive_tbptt import SequenceStream, Trainer
from adaptive_tbptt.model import LossFn

from ..config import TrainConfig
from .sequence_model import perplexity, symbol_loss


@dataclass(frozen=True, kw_only=True)
class PerplexityConfig(TrainConfig):
    """Shared by the copy task and language modelling."""

    score: ClassVar[str] = "ppl"

    @property
    def loss_fn(self) -> LossFn:
        """Cross entropy."""
        return symbol_loss

    def valid_metrics(self, loss: float) -> dict[str, float]:
        """Perplexity."""
        return {"valid_ppl": perplexity(loss)}

    def test_metrics(self, trainer: Trainer, test: SequenceStream) -> dict[str, float]:
        """Perplexity."""
        return {"test_ppl": perplexity(trainer.evaluate(test))}
