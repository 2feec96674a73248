"""Whether the training loss still falls.

Blocks of windows double in length: windows 65 to 128, 129 to 256, 257 to 512, ... Each block is
compared with the one before it. A loss that falls like a power of the number of updates falls by
the same factor from block to block, however late it is; on a plateau two blocks are equal.

Logarithms of the losses are compared: squared errors have rare large values, which would hide that
most of them fall. A loss that may be negative is compared as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

READ = 64  # windows whose losses are read at once: reading one makes an accelerator wait
CLEARLY = 2.0  # standard errors between two blocks; as for an interval of 95 %


class LossTrend:
    """Collects the losses of windows and compares blocks of them.

    Attributes:
        stalled: whether the newest block is not clearly below the one before it; None until two
            blocks are complete.
    """

    def __init__(self) -> None:
        self.stalled: bool | None = None
        self._pending: list[Tensor] = []
        self._windows = 0
        self._block = [0.0, 0.0, 0.0]  # windows, their mean loss, sum of squared deviations
        self._before: list[float] | None = None
        self._positive = True  # all losses so far

    def add(self, loss: Tensor) -> None:
        """Add the loss of a window."""
        self._pending.append(loss.detach())
        # Not by the number that wait: a checkpoint reads them early, and must not change the rest.
        if (self._windows + len(self._pending)) % READ == 0:
            self._read()

    def _read(self) -> None:
        for loss in self._drained():
            if loss <= 0.0 and self._positive:
                self._positive, self._before, self._block = False, None, [0.0, 0.0, 0.0]
            value = math.log(loss) if self._positive else loss
            self._windows += 1
            block = self._block
            block[0] += 1.0
            step = value - block[1]
            block[1] += step / block[0]
            block[2] += step * (value - block[1])
            # A power of two ends a block.
            if self._windows >= READ and self._windows & (self._windows - 1) == 0:
                self._close()

    def _drained(self) -> Iterator[float]:
        values = torch.stack(self._pending).tolist() if self._pending else []
        self._pending = []
        yield from values

    def _close(self) -> None:
        if self._before is not None:
            error = math.sqrt(sum(s / n**2 for n, _, s in (self._before, self._block)))
            fallen = self._before[1] - self._block[1]
            self.stalled = not fallen > CLEARLY * error  # a NaN has not fallen
        self._before, self._block = self._block, [0.0, 0.0, 0.0]

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers."""
        self._read()
        return {
            "stalled": self.stalled,
            "windows": self._windows,
            "block": list(self._block),
            "before": self._before,
            "positive": self._positive,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        self._pending = []
        self.stalled, self._windows = saved["stalled"], saved["windows"]
        self._block, self._before = list(saved["block"]), saved["before"]
        self._positive = saved.get("positive", False)  # older checkpoints compared losses
