"""The random state of a process: torch on the CPU and on CUDA devices, numpy and Python."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def get_random_state() -> dict[str, Any]:
    """Return the random state as a nest that a checkpoint can hold."""
    numpy: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    name, keys, position, has_gauss, gauss = numpy
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (str(name), torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "python": random.getstate(),
    }


def set_random_state(saved: dict[str, Any]) -> None:
    """Undo `get_random_state`; skip CUDA if the number of devices differs."""
    torch.set_rng_state(saved["torch"])
    if torch.cuda.is_available() and len(saved["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(saved["cuda"])
    name, keys, *rest = saved["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    random.setstate(saved["python"])
