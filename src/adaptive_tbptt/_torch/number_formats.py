"""Number formats: autocast, float64 where a device has it, and denormals.

Gradients that have decayed below about 1e-38 are denormal in float32, and a processor handles
those many times more slowly than others: twelve times, for an LSTM with 900 units over 400 steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor


class Scaler(Protocol):
    """What is asked of a `torch.amp.GradScaler`."""

    def scale(self, outputs: Tensor, /) -> Tensor:
        """Multiply a loss by the scale."""


NO_FLOAT64 = {"mps"}  # types of devices


def wide(x: Tensor) -> Tensor:
    """Return float64, on the CPU where the device has no such numbers."""
    return (x.cpu() if x.device.type in NO_FLOAT64 else x).double()


def autocast_format(device: torch.device) -> torch.dtype | None:
    """Return the number format that autocast computes in on a device; None where it is off."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


@contextmanager
def no_autocast(device: torch.device) -> Iterator[None]:
    """Switch autocast off, for a backward pass: it computes in the formats of the forward pass."""
    if autocast_format(device) is None:
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield


# Drop the copies of the weights that autocast keeps until its outermost block ends. In a block
# around a whole loop they would be those of its first step for ever. Before torch 2.11 copies made
# without gradient also kept the weights from getting one.
forget_casts = torch.clear_autocast_cache


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Flush inside the block, and put the flag back as it was."""
    before = sys.float_info.min / 2 == 0.0  # torch has no getter for the flag of this thread
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
