"""Tables of the report: runs at a glance, configuration and its differences, machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .charts import finite
from .curves import curve_of, truncation_curve
from .read import Row, Run


@dataclass(frozen=True)
class Table:
    """A table with a heading for each row and column: the first of each row and of `columns`."""

    caption: str
    columns: list[str]
    rows: list[list[str]]


def overview(runs: Sequence[Run]) -> Table:
    """One column per run, so that runs compare line by line; this fits a phone."""
    return _table("Runs at a glance", "", runs, [_facts(run) for run in runs], "none")


def _facts(run: Run) -> Row:
    last, valid = run.epochs.last, curve_of(run, run.epochs, "valid_loss")
    k, bias = truncation_curve(run).y, finite(curve_of(run, run.estimates, "relative_bias").y)
    facts = {"asked": run.setting, "epochs": last["epoch"], "updates": last.get("updates", "none")}
    facts["training time"] = _duration(last["seconds"])
    facts["last training loss"] = _number(last["train_loss"])
    if valid.exists:
        best = int(np.nanargmin(valid.y))
        facts["best validation loss"] = f"{valid.y[best]:.4g} (epoch {valid.epoch[best]:g})"
    for key, value in last.items():
        if key.startswith("test_"):
            facts[f"test {key[5:]} at best"] = _number(value)
    facts["K: least, median, largest"] = ", ".join(f"{f(k):g}" for f in (np.min, np.median, np.max))
    facts["median estimated bias"] = _number(np.median(bias)) if len(bias) else "not estimated"
    return facts


def configuration(runs: Sequence[Run]) -> Table:
    """Every setting of every run."""
    return _table("Configuration", "setting", runs, [run.config for run in runs], "not set")


def differences(runs: Sequence[Run]) -> Table:
    """The settings in which runs differ."""
    whole = configuration(runs)
    rows = [row for row in whole.rows if len(set(row[1:])) > 1]
    return Table("Differences in configuration", whole.columns, rows)


def machines(runs: Sequence[Run]) -> Table:
    """Where runs were last started, and with what versions."""
    lasts = [{"starts": len(run.starts), **run.starts[-1]} if run.starts else {} for run in runs]
    return _table("Machine and versions", "last start", runs, lasts, "not recorded")


def _table(
    caption: str, corner: str, runs: Sequence[Run], columns: Sequence[Row], missing: str
) -> Table:
    """Return a table with a column for each run and a row for each key."""
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [[key, *(str(column.get(key, missing)) for column in columns)] for key in keys]
    return Table(caption, [corner, *(run.name for run in runs)], rows)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "none"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
