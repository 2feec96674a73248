"""What `atbptt diagnose` looks at: a run as it was trained, or somebody's own model and data."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from adaptive_tbptt.data.stream import Stream
from adaptive_tbptt.train.checkpoint import load, load_model

from ..config import GAUGES, nearest
from .report import load_run


def load_target(
    target: str, tasks: dict[str, Any], window: int | None, burn_in: int | None, gauge: str | None
) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    """Return model, loss and data of a target, and how to measure, as arguments of `diagnose`.

    What is None is the run's own, or the default of `diagnose` but for a window of 100.
    """
    if gauge is not None and gauge not in GAUGES:
        raise nearest(gauge, GAUGES, "gauge")
    options = {"window": window, "k_max": window, "burn_in": burn_in}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if ":" in target and not Path(target).exists():
        own = {} if gauge is None else {"gauge": GAUGES[gauge]()}
        return _make(target), {"window": 100} | own | given
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
    own = config.changed(gauge=gauge).measurement()
    own["k_min"] = min(own["k_min"], own["window"] if window is None else window)
    return (model, config.loss_fn, config.streams()["valid"]), own | given


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
    if not isinstance(made[2], Stream | tuple | list):
        raise ValueError(
            f"the stream of {target} must be a SequenceStream, a ChunkStream or a pair (inputs, "
            f"targets), got {type(made[2]).__name__}"
        )
    return made
