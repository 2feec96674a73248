"""The random state of a process: torch on the CPU and on CUDA devices, numpy and Python."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def _accelerators(module: nn.Module) -> list[torch.device]:
    devices = {p.device for p in module.parameters()} | {b.device for b in module.buffers()}
    return sorted((d for d in devices if d.type not in ("cpu", "meta")), key=str)


def _fork_random_state(stack: ExitStack, module: nn.Module) -> None:
    accelerators = _accelerators(module)
    if not accelerators:
        stack.enter_context(torch.random.fork_rng(devices=[]))
    for d in accelerators:
        stack.enter_context(torch.random.fork_rng(devices=[d.index or 0], device_type=d.type))


RandomState = list[Tensor]


def random_state_of(module: nn.Module) -> RandomState:
    """Return torch's random state on the CPU and on the devices of a module."""
    others = [torch.get_device_module(d).get_rng_state(d) for d in _accelerators(module)]
    return [torch.get_rng_state(), *others]


def restore_random_state(module: nn.Module, saved: RandomState) -> None:
    """Undo `random_state_of`."""
    torch.set_rng_state(saved[0])
    for d, state in zip(_accelerators(module), saved[1:], strict=True):
        torch.get_device_module(d).set_rng_state(state, d)


def get_random_state() -> dict[str, Any]:
    """Return it as a nest that a checkpoint can hold."""
    numpy: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    name, keys, position, has_gauss, gauss = numpy
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (str(name), torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "python": random.getstate(),
    }


def set_random_state(saved: dict[str, Any]) -> None:
    """Undo `get_random_state`; devices that are not here are left out."""
    torch.set_rng_state(saved["torch"])
    if torch.cuda.is_available() and len(saved["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(saved["cuda"])
    name, keys, *rest = saved["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    random.setstate(saved["python"])
