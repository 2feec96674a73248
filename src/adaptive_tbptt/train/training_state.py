"""Everything that a checkpoint holds of a training run, and how a resumed run takes it back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from .._torch.random_state import get_random_state, set_random_state
from ..data.stream import Stream
from ..loop.adaptive import AdaptiveTBPTT
from .run_progress import RunProgress
from .weights import Weights, load_weights, weights_of


@dataclass(frozen=True)
class TrainingState:
    """The objects of a run that have a state; together they make up a checkpoint.

    Attributes:
        tbptt: the model, the loss, the carried states and K.
        optimizer: the optimiser.
        scheduler: the scheduler, or None.
        stream: the training stream.
        progress: how far the run has come.
    """

    tbptt: AdaptiveTBPTT
    optimizer: Optimizer
    scheduler: Any
    stream: Stream
    progress: RunProgress

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to equal one that never stopped.

        Where several processes train, all must call this. The result can be loaded by any number
        of processes; only the random states belong to each of them.
        """
        weights = weights_of(self.tbptt)
        return {
            "model": weights.model,
            "loss": weights.loss,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "tbptt": self.tbptt.state_dict(),
            "stream": self.stream.state_dict(),
            "random": self.tbptt.ranks.gather(get_random_state()),
            **self.progress.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any], source: str) -> None:
        """Continue from what `state_dict` returned.

        Args:
            saved: the checkpoint.
            source: where it comes from, for error messages.
        """
        # The weights first: if they do not fit, this raises and nothing has changed.
        load_weights(self.tbptt, Weights(saved["model"], saved.get("loss", [])), source)
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(saved["scheduler"])
        self.stream.load_state_dict(saved["stream"])
        self.tbptt.load_state_dict(saved["tbptt"])
        self.progress.load_state_dict(saved)
        _load_random_state(saved["random"], self.tbptt.ranks.index)


def _load_random_state(saved: list[dict[str, Any]], index: int) -> None:
    """Give each process its own random state back, and a new one to processes that are new."""
    set_random_state(saved[min(index, len(saved) - 1)])
    if index >= len(saved):
        torch.manual_seed(torch.initial_seed() + index)
