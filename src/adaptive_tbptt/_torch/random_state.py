"""The random state of a process: torch on the CPU and on CUDA devices, numpy and Python."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .devices import accelerators_of

RandomState = list[Tensor]


def random_state_of(module: nn.Module) -> RandomState:
    """Return torch's random state on the CPU and on the devices of a module."""
    others = [torch.get_device_module(d).get_rng_state(d) for d in accelerators_of(module)]
    return [torch.get_rng_state(), *others]


def restore_random_state(module: nn.Module, saved: RandomState) -> None:
    """Undo `random_state_of`."""
    torch.set_rng_state(saved[0])
    for d, state in zip(accelerators_of(module), saved[1:], strict=True):
        torch.get_device_module(d).set_rng_state(state, d)


@contextmanager
def forked_random_state(module: nn.Module) -> Iterator[None]:
    """Give the block random states of its own on the CPU and on the module's accelerators."""
    accelerators = accelerators_of(module)
    with ExitStack() as stack:
        if not accelerators:
            stack.enter_context(torch.random.fork_rng(devices=[]))
        for d in accelerators:
            stack.enter_context(torch.random.fork_rng(devices=[d.index or 0], device_type=d.type))
        yield


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
