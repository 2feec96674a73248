"""Where a module lives: its device, and the accelerators whose random state a pass may use."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the module's first parameter or buffer; the CPU if it has neither."""
    first = next(chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def accelerators_of(module: nn.Module) -> list[torch.device]:
    """Return the devices other than the CPU that hold parts of the module."""
    devices = {tensor.device for tensor in chain(module.parameters(), module.buffers())}
    return sorted((d for d in devices if d.type not in ("cpu", "meta")), key=str)
