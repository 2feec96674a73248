"""Opens the run folders of `atbptt-paper train` for the library's command `atbptt`.

`pyproject.toml` registers `open_run` as an entry point; `adaptive_tbptt.run_targets` describes the
protocol.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adaptive_tbptt.run_targets import RunTarget
from adaptive_tbptt.train import load_checkpoint, load_model, read_rows, read_toml
from adaptive_tbptt.truncate import PaperGauge, ReleaseGauge

from ..config import TrainConfig
from ..tasks import TASKS


def open_run(folder: Path) -> RunTarget | None:
    """Return the model of a run at its best parameters, with its data and settings.

    None where the folder is not a run of one of the paper's tasks.
    """
    config = read_config(folder)
    if config is None:
        return None
    model = config.model()
    best = folder / "checkpoints" / "best.safetensors"
    load_model(model, load_checkpoint(best), best)
    row = best_epoch(folder)
    k, losses = row.get("k"), config.losses
    if config.recommended:  # its windows have no context
        k, losses = 0, config.make_tbptt(model).losses_per_window(k or 0)
    return RunTarget(
        model=model,
        loss_fn=config.loss_fn,
        streams=config.streams(),
        delta=config.delta,
        k=k,
        losses=losses,
        losses_per_k=config.losses_per_k,
        lags=config.lags,
        burn_in=config.burn_in,
        k_min=config.k_min,
        k_max=config.k_max,
        gauges={"paper": PaperGauge(tau=config.tau), "release": ReleaseGauge(tau=config.tau)},
        seed=config.seed,
        epoch=row.get("epoch"),
        folder=folder,
    )


def read_config(folder: Path) -> TrainConfig | None:
    """Return the configuration of a run, or None where the folder is no run of the paper's."""
    path = folder / "config.toml"
    task = read_toml(path).get("task") if path.is_file() else None
    if not isinstance(task, str) or task not in TASKS:
        return None
    return TASKS[task].config.from_toml(path)


def best_epoch(folder: Path) -> dict[str, Any]:
    """Return the metrics of the epoch with the lowest validation loss; nothing before the first."""
    rows = read_rows(folder / "metrics.jsonl")
    epochs = [r for r in rows if r.get("event") == "epoch" and r["valid_loss"] is not None]
    return min(epochs, key=lambda row: row["valid_loss"], default={})
