"""The running mean of the training loss, looked at rarely so that a GPU is not made to wait."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._torch.number_formats import wide


class LossMeter:
    """Collects losses as tensors; `flush` brings them to the host and checks them."""

    def __init__(self) -> None:
        self.total, self.weight = 0.0, 0.0
        self._pending: list[tuple[Tensor, float, int]] = []

    def add(self, loss: Tensor, weight: float, step: int) -> None:
        """Note the loss of a window, the number of losses in it, and the data step it ended at."""
        self._pending.append((loss, weight, step))

    @property
    def pending(self) -> int:
        """Losses noted since the last flush."""
        return len(self._pending)

    def flush(self) -> tuple[int, float] | None:
        """Add up what was noted; return the step and value of the first loss that is not finite."""
        if not self._pending:
            return None
        values = wide(torch.stack([loss for loss, _, _ in self._pending])).tolist()
        entries, self._pending = self._pending, []
        for value, (_, weight, step) in zip(values, entries, strict=True):
            if not math.isfinite(value):
                return step, value
            self.total += value * weight
            self.weight += weight
        return None

    @property
    def mean(self) -> float:
        """Mean over all losses flushed so far; NaN before the first."""
        return self.total / self.weight if self.weight else float("nan")

    def state_dict(self) -> dict[str, Any]:
        """Return the sums; flush first."""
        return {"total": self.total, "weight": self.weight}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from saved sums."""
        self.total, self.weight = saved["total"], saved["weight"]
