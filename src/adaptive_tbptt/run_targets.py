"""The targets of `atbptt diagnose` and `atbptt check-bias`: your own model, or a run folder.

The library cannot rebuild the model and the data of a run folder. The package that wrote the folder
can, if it registers a function in its `pyproject.toml`:

    [project.entry-points."adaptive_tbptt.run_folders"]
    mine = "my_package.runs:open_run"

`open_run(folder)` takes the path of a folder. It returns a `RunTarget` if the folder is a run of
its package. Otherwise it returns None, and `atbptt` asks the next package. If the run is its own
but cannot be used, it raises ValueError with a sentence for the user.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Self

from torch import nn

from . import defaults
from .data import Stream
from .diagnosis.sampling import as_stream
from .model import LossFn, Recurrent, as_recurrent
from .truncate import PaperGauge, ReleaseGauge, StateGauge

__all__ = ["RUN_FOLDERS", "RunTarget", "open_run_folder", "open_target"]

RUN_FOLDERS = "adaptive_tbptt.run_folders"  # the group of entry points


@dataclass(frozen=True, kw_only=True)
class RunTarget:
    """A model, its data, and what is known of its training.

    Attributes:
        model: at the parameters and in the mode to measure.
        loss_fn: `loss_fn(outputs, targets)`, a mean over time and batch.
        streams: the data by split. `diagnose` and `lookback` take 'valid', `check-bias` 'train'; a
            single stream may have any name. For `lookback`, batches of independent windows will do.
        delta: the relative bias that training tolerated; None if there was no tolerance.
        k: the truncation length in use at these parameters; None if unknown.
        losses: K2 in steps; None is `losses_per_k` times K.
        losses_per_k: K2 as a multiple of K.
        lags: lags to measure, and of the reference; `diagnose` goes as far as the data allow.
        burn_in: steps that warm up the state.
        k_min: smallest K to choose.
        k_max: largest K to choose; None is `lags`.
        gauges: the paper's gauges by name, with the settings of the run.
        seed: of the run; measurements derive theirs from it.
        epoch: the epoch of the parameters; None if unknown.
        folder: the run folder. `check-bias` appends its result to the `check_bias.jsonl` there.
    """

    model: nn.Module | Recurrent
    loss_fn: LossFn
    streams: Mapping[str, Any]
    delta: float | None = None
    k: int | None = None
    losses: int | None = None
    losses_per_k: float = 1.0
    lags: int = defaults.PROBE_LAGS
    burn_in: int = defaults.BURN_IN
    k_min: int = defaults.K_MIN
    k_max: int | None = None
    gauges: Mapping[str, StateGauge] = field(
        default_factory=lambda: {"paper": PaperGauge(), "release": ReleaseGauge()}
    )
    seed: int = 0
    epoch: int | None = None
    folder: Path | None = None

    def __post_init__(self) -> None:
        if not self.streams:
            raise ValueError("streams must hold at least one split")

    def changed(self, **values: Any) -> Self:
        """Return a copy with some values replaced; None leaves a value as it is."""
        return replace(self, **{name: v for name, v in values.items() if v is not None})

    def stream(self, split: str) -> Stream:
        """Return the data of a split as a stream."""
        return as_stream(self.data(split), as_recurrent(self.model))

    def data(self, split: str) -> Any:
        """Return the data of a split; a single one serves as every split."""
        if len(self.streams) == 1:
            return next(iter(self.streams.values()))
        if split not in self.streams:
            raise ValueError(f"split must be one of {', '.join(self.streams)}; got {split!r}")
        return self.streams[split]

    def losses_per_window(self, k: int) -> int:
        """Return K2 for a truncation length."""
        return max(1, round(self.losses_per_k * k)) if self.losses is None else self.losses


def open_target(target: str) -> RunTarget:
    """Return what `target` names: `module:factory`, or a run folder.

    `factory()` returns `(model, loss_fn, stream)`. The stream may also be a pair `(inputs,
    targets)`, laid out as the model takes it, or for `lookback` batches of windows.
    """
    folder = Path(target)
    if folder.is_dir():
        return open_run_folder(folder)
    if ":" in target and not folder.exists():
        return _call_factory(target)
    raise ValueError(
        f"{target} is neither a run folder nor module:factory, such as runs/copy-delta-0.1 "
        "or mymodule:make"
    )


def open_run_folder(folder: Path) -> RunTarget:
    """Let the installed packages open a run folder; the module's docstring has the protocol."""
    asked = []
    for entry in entry_points(group=RUN_FOLDERS):
        found: RunTarget | None = entry.load()(folder)
        if found is not None:
            return found
        asked.append(entry.name if entry.dist is None else entry.dist.name)
    who = f"asked {', '.join(dict.fromkeys(asked))}" if asked else "none registers run folders"
    raise ValueError(
        f"no installed package can open the run folder {folder} ({who}): install the one that made "
        "it, such as adaptive-tbptt-paper for runs of atbptt-paper, or give module:factory"
    )


def _call_factory(target: str) -> RunTarget:
    """Call the factory that module:factory names."""
    module, _, name = target.partition(":")
    sys.path.insert(0, os.getcwd())
    factory = getattr(importlib.import_module(module), name, None)
    if factory is None:
        raise ValueError(f"module {module} has no {name}")
    made = factory()
    if not isinstance(made, tuple) or len(made) != 3:
        raise ValueError(f"{target} must return (model, loss_fn, stream)")
    model, loss_fn, stream = made
    return RunTarget(model=model, loss_fn=loss_fn, streams={"data": stream})
