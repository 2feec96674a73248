"""Read a run folder: what the report needs of `config.toml`, `metrics.jsonl` and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..train.files import read_rows, read_toml

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The records of a run.

    Attributes:
        name: its name in the report.
        config: `config.toml`; empty for your own `Trainer`.
        epochs: a row of metrics for every epoch, at least one.
        probes: a row for every estimate of K.
        checks: rows of `check_bias.jsonl` about the K in use, on the training data, with the step
            at which its epoch ended.
        starts: when and where it was started or resumed; empty for runs of old releases.
    """

    name: str
    config: Row
    epochs: list[Row]
    probes: list[Row]
    checks: list[Row]
    starts: list[Row]

    @cached_property
    def estimates(self) -> list[Row]:
        """The estimates of beta and bias; for a fixed K the means of the repeats, if it has any."""
        return self.probes or [_mean_of_repeats(row) for row in self.epochs if "repeats" in row]

    @property
    def delta(self) -> float | None:
        """The tolerance; None if K was fixed."""
        asked: float | None = self.config.get("delta")
        return self.probes[-1].get("delta", asked) if self.probes else asked

    @property
    def setting(self) -> str:
        """The setting of the run, such as delta=0.1 or K=10."""
        return f"K={self.epochs[-1]['k']}" if self.delta is None else f"delta={self.delta:g}"


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read run folders under unique names."""
    whole = [folder.resolve() for folder in folders]
    for i, folder in enumerate(whole):
        if folder in whole[:i]:
            raise ValueError(f"{folders[i]} is given twice")
    names = [folder.name for folder in whole]
    if len(set(names)) < len(names):
        names = [f"{folder.parent.name}/{folder.name}" for folder in whole]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in whole]
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def read_run(folder: Path, name: str) -> Run:
    """Read a run folder, or say what it lacks."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        what = "it has no metrics.jsonl" if folder.is_dir() else "there is no such folder"
        raise ValueError(f"{folder} is not a run folder: {what}")
    rows = read_rows(path)
    epochs = [row for row in rows if row.get("event") == "epoch"]
    if not epochs:
        raise ValueError(f"{path} holds no finished epoch: there is nothing to report yet")
    for key in ("step", "epoch", "seconds", "k", "train_loss"):
        if any(key not in row for row in epochs):
            raise ValueError(f"{path} is not that of a run: an epoch has no {key!r}")
    config = folder / "config.toml"
    ended = {(row["epoch"], row["k"]): row["step"] for row in epochs}
    return Run(
        name=name,
        config=read_toml(config) if config.is_file() else {},
        epochs=epochs,
        probes=[row for row in rows if row.get("event") == "estimate"],
        checks=[
            {**row, "step": ended[row.get("epoch"), row.get("k")]}
            for row in read_rows(folder / "check_bias.jsonl")
            if row.get("split", "train") == "train" and (row.get("epoch"), row.get("k")) in ended
        ],
        starts=read_rows(folder / "starts.jsonl"),
    )


def _mean_of_repeats(row: Row) -> Row:
    means: Row = {"step": row["step"], "epoch": row["epoch"], "k": row["k"]}
    for key in ("beta", "relative_bias"):
        values = [value for value in row["repeats"][key] if value is not None]
        means[key] = float(np.mean(values)) if values else None
    return means
