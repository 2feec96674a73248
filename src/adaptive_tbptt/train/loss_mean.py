"""The mean training loss of an epoch, read from the device only now and then."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._torch.number_formats import wide


class LossMean:
    """Collect the losses of windows as tensors; `flush` reads and checks them.

    Reading a loss makes the host wait for the GPU, so the trainer does it once for many windows.
    """

    def __init__(self) -> None:
        self.total, self.weight = 0.0, 0.0
        self._pending: list[tuple[Tensor, float, int]] = []

    def add(self, loss: Tensor, weight: float, step: int) -> None:
        """Add a window: its mean loss, how many losses that averages over, and its last step."""
        self._pending.append((loss, weight, step))

    @property
    def pending(self) -> int:
        """Number of windows added since the last flush."""
        return len(self._pending)

    def flush(self) -> tuple[int, float] | None:
        """Read all pending losses; return step and value of the first that is not finite."""
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
        """Mean over all losses flushed so far; NaN if there are none."""
        return self.total / self.weight if self.weight else float("nan")

    def state_dict(self) -> dict[str, Any]:
        """Return the sums. Flush first: pending losses are not part of it."""
        return {"total": self.total, "weight": self.weight}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from saved sums."""
        self.total, self.weight = saved["total"], saved["weight"]
