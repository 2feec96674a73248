"""What `atbptt diagnose` looks at: a run as it was trained, or somebody's own model and data."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from ..checkpoint import load, load_model
from ..stream import SequenceStream
from .report import load_run


def load_target(target: str, tasks: dict[str, Any]) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    """Return model, loss and data of a target, and how it measures if it is a run."""
    if ":" in target and not Path(target).exists():
        return _make(target), {}
    folder = Path(target)
    if not folder.is_dir():
        raise ValueError(
            f"{target} is neither a run folder nor module:factory, such as runs/copy-delta-0.1 "
            "or mymodule:make"
        )
    config = load_run(folder, tasks)
    best = folder / "checkpoints" / "best.safetensors"
    model = config.model()
    load_model(model, load(best), best)
    return (model, config.loss_fn, config.streams()["valid"]), config.measurement()


def _make(target: str) -> tuple[Any, Any, Any]:
    """Call the factory that module:factory names."""
    module, _, name = target.partition(":")
    sys.path.insert(0, os.getcwd())
    factory = getattr(importlib.import_module(module), name, None)
    if factory is None:
        raise ValueError(f"module {module} has no {name}")
    made = factory()
    if not isinstance(made, tuple) or len(made) != 3:
        raise ValueError(f"{target} must return (model, loss_fn, stream)")
    if not isinstance(made[2], SequenceStream | tuple | list):
        raise ValueError(
            f"the stream of {target} must be a SequenceStream or a pair (inputs, targets), which "
            f"random segments can be cut from; got a {type(made[2]).__name__}"
        )
    return made
