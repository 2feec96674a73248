"""Read a run folder: what the report needs of `config.toml`, `metrics.jsonl` and the rest."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedFileError
from ..train.files import each_row, read_rows, read_toml

Row = dict[str, Any]
Array = NDArray[np.float64]
WHOLE = 1000  # rows of a kind that are kept whole, or up to twice as many; arbitrary


class Rows:
    """Rows of one kind: some numbers of all of them, and some of them whole.

    A run may have a million rows, which would fill gigabytes as dicts.

    Args:
        keys: which numbers to keep.

    Attributes:
        last: the last row.
        whole: rows by their place, evenly spread: all of them up to twice `WHOLE`.
    """

    def __init__(self, *keys: str) -> None:
        self._columns = {key: array("d") for key in keys}
        self.last: Row = {}
        self.whole: dict[int, Row] = {}
        self._every, self._count = 1, 0

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._count

    def add(self, row: Row) -> None:
        """Add a row."""
        for key, column in self._columns.items():
            value = row.get(key)
            try:
                column.append(math.nan if value is None else value)
            except (TypeError, OverflowError):
                raise ValueError(f"{key!r} is not a number but {value!r:.40}") from None
        self.last = row
        if self._count % self._every == 0:
            self.whole[self._count] = row
        self._count += 1
        if len(self.whole) > 2 * WHOLE:
            self._every *= 2
            self.whole = {i: r for i, r in self.whole.items() if i % self._every == 0}

    def column(self, key: str) -> Array:
        """Return a number of every row, NaN for what is missing."""
        return np.array(self._columns[key])


@dataclass(frozen=True)
class Run:
    """The records of a run.

    Attributes:
        name: what the report calls it.
        config: `config.toml`; empty for a `Trainer` of one's own.
        epochs: the metrics of every epoch, at least one.
        probes: those of every estimate of K.
        repeats: for epochs that repeated the estimate, the means of its repeats.
        checks: rows of `check_bias.jsonl` about the K that was used, on the training data, with
            the step at which its epoch ended.
        starts: when and where it was started and gone on with; empty for runs of old releases.
    """

    name: str
    config: Row
    epochs: Rows
    probes: Rows
    repeats: Rows
    checks: Rows
    starts: list[Row]

    @property
    def estimates(self) -> Rows:
        """The estimates of beta and bias; for a fixed K the means of the repeats, if it has any."""
        return self.probes if len(self.probes) else self.repeats

    @property
    def delta(self) -> float | None:
        """The tolerance; None if there was none."""
        asked: float | None = self.config.get("delta")
        return self.probes.last.get("delta", asked)

    @property
    def setting(self) -> str:
        """What was asked for, such as delta=0.1 or K=10."""
        if self.guessed:
            return "recommended"
        return f"K={self.epochs.last['k']}" if self.delta is None else f"delta={self.delta:g}"

    @property
    def guessed(self) -> bool:
        """Whether K was the best guess, which promises no bias."""
        return self.probes.last.get("outcome") in ("BEST_GUESS", "HIDDEN", "BEST_PACE", "KEPT")


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
    epochs = Rows("step", "epoch", "seconds", "k", "train_loss", "valid_loss")
    probes, repeats = (Rows("step", "k", "beta", "relative_bias") for _ in range(2))
    try:
        for row in each_row(path):
            if row.get("event") == "estimate":
                probes.add(row)
            if row.get("event") == "epoch":
                for key in ("step", "epoch", "seconds", "k", "train_loss"):
                    if key not in row:
                        raise ValueError(f"an epoch has no {key!r}")
                epochs.add(row)
                if "repeats" in row:
                    repeats.add(_mean_of_repeats(row))
    except DamagedFileError:  # names the file and the line
        raise
    except ValueError as error:
        raise DamagedFileError(f"{path} is not what a run writes: {error}") from None
    if not len(epochs):
        raise ValueError(f"{path} holds no finished epoch: there is nothing to report yet")
    config = folder / "config.toml"
    return Run(
        name=name,
        config=read_toml(config) if config.is_file() else {},
        epochs=epochs,
        probes=probes,
        repeats=repeats,
        checks=_checks(folder / "check_bias.jsonl", epochs),
        starts=read_rows(folder / "starts.jsonl"),
    )


def _checks(path: Path, epochs: Rows) -> Rows:
    """Return the checks of the K that an epoch used, on the training data, with its last step."""
    rows = [row for row in read_rows(path) if row.get("split", "train") == "train"]
    wanted = {(row.get("epoch"), row.get("k")) for row in rows}
    columns = (epochs.column(key).tolist() for key in ("epoch", "k", "step")) if rows else ([],) * 3
    ended = {(e, k): step for e, k, step in zip(*columns, strict=True) if (e, k) in wanted}
    checks = Rows("step", "measured", "low", "high")
    for row in rows:
        if (row.get("epoch"), row.get("k")) in ended:
            checks.add({**row, "step": ended[row.get("epoch"), row.get("k")]})
    return checks


def _mean_of_repeats(row: Row) -> Row:
    means: Row = {"step": row["step"], "epoch": row["epoch"], "k": row["k"]}
    for key in ("beta", "relative_bias"):
        values = [value for value in row["repeats"][key] if value is not None]
        means[key] = float(np.mean(values)) if values else None
    return means
