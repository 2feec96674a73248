"""A table of the paper, cell by cell: one setting and one initialisation each."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adaptive_tbptt.errors import DamagedFileError
from adaptive_tbptt.train import origin, short_number, write_text

from ..config import TrainConfig, present_names
from .run import RunResult

AGAIN = "Remove it, and `reproduce` trains the cell again"


@dataclass(frozen=True)
class Cell:
    """One training run of a table."""

    config: Any
    init: int

    @property
    def name(self) -> str:
        """File name of its results."""
        setting = self.config.setting.replace("=", "-").replace(" ", "-")
        return f"{setting}_init-{self.init}"


def grid(base: TrainConfig, settings: list[dict[str, Any]], inits: int) -> list[Cell]:
    """Return every setting with every initialisation; initialisations come in rounds."""
    return [
        Cell(base.changed(seed=init, **setting), init)
        for init in range(inits)
        for setting in settings
    ]


def summarise(cell: Cell, result: RunResult) -> dict[str, Any]:
    """Boil a run down to what tables, figures and findings need: some tens of kilobytes."""
    history, found = result.fit.history, result.diagnosis
    scores = [n for n in result.best if n.startswith(("valid_", "test_")) and n != "valid_loss"]
    columns = ("epoch", "data_passes", "seconds", *scores, "k", "relative_bias", "beta")
    norms = found.profile.measured
    return {
        "setting": cell.config.setting,
        "init": cell.init,
        "config": fingerprint(cell.config),
        "epochs": result.fit.epochs,
        "best_epoch": result.fit.best_epoch,
        **{name: result.best[name] for name in scores},
        "seconds": history[-1]["seconds"],
        "updates": history[-1]["updates"],
        "curves": {name: [short_number(row.get(name)) for row in history] for name in columns},
        "repeats": [
            {
                "epoch": row["epoch"],
                **{k: [short_number(v) for v in vs] for k, vs in row["repeats"].items()},
            }
            for row in history
            if "repeats" in row
        ],
        "decay": {
            "mean": [short_number(v) for v in norms.mean(axis=1)],
            "draws": [[short_number(v) for v in column] for column in norms.T[:12]],
            "beta": found.fit.beta,
            "tau": found.fit.tau,
            "last": found.fit.last,
            "component_beta": found.component_beta,
            "components": {
                name: [short_number(v) for v in np.nan_to_num(part).mean(axis=1)]
                for name, part in found.profile.component_norms.items()
            },
        },
        "choices": [{"delta": d.delta, "k": d.k, "met": d.outcome.met} for d in found.decisions],
        "stability": found.stability.verdict,
        "jacobian_norm": found.stability.jacobian_norm,
        "origin": origin(),
    }


def fingerprint(config: TrainConfig) -> dict[str, Any]:
    """Return every value of a configuration, with names instead of paths."""
    values = dataclasses.asdict(config)
    values.pop("cache", None)
    if values.get("data") is not None:
        values["data"] = Path(values["data"]).name
    return values


def write_json(path: Path, content: Any) -> None:
    """Write results."""
    write_text(path, as_json(content))


def as_json(content: Any) -> str:
    """Return results as the text of their file; NaN and infinities are refused."""
    return json.dumps(content, allow_nan=False) + "\n"


def read_cells(folder: Path) -> list[dict[str, Any]]:
    """Return the finished cells of a table."""
    return [read_cell(path) for path in sorted((folder / "cells").glob("*.json"))]


def read_cell(path: Path) -> dict[str, Any]:
    """Return a finished cell, or say which file is none."""
    try:
        cell = json.loads(path.read_text())
    except ValueError as error:
        raise DamagedFileError(f"{path} is not a finished cell: {error}. {AGAIN}") from None
    wanted = ("setting", "init", "epochs", "curves")
    if not isinstance(cell, dict) or any(name not in cell for name in wanted):
        raise DamagedFileError(
            f"{path} is not a finished cell: it lacks {', '.join(wanted)}. {AGAIN}"
        )
    if isinstance(cell.get("config"), dict):
        cell["config"] = present_names(cell["config"])
    return cell


def score_of(cell: dict[str, Any], metric: str) -> float:
    """Return a metric of a finished cell; a perplexity that overflowed is kept as null."""
    return math.inf if cell[metric] is None else float(cell[metric])


def deviation(values: list[float]) -> float | None:
    """Return the standard deviation; None for a single value or where one overflowed."""
    spread = len(values) > 1 and all(map(math.isfinite, values))
    return statistics.stdev(values) if spread else None
