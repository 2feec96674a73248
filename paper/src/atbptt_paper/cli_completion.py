"""What the shell completes of the paper's names: presets, tables, settings of a table."""

from __future__ import annotations

import typer

from .experiments.paper import EXPERIMENTS
from .tasks import TASKS

__all__ = ["presets_of_table", "presets_of_task", "settings_of_table"]


def presets_of_task(ctx: typer.Context) -> list[str]:
    """Return the presets of the task that is already typed."""
    task = TASKS.get(ctx.params.get("task") or "")
    return [] if task is None else list(task.presets)


def presets_of_table(ctx: typer.Context) -> list[str]:
    """Return the presets of the table that is already typed."""
    table = EXPERIMENTS.get(ctx.params.get("name") or "")
    return ["paper", "quick"] if table is None else list(table.presets)


def settings_of_table(ctx: typer.Context) -> list[str]:
    """Return the settings of the table that is already typed."""
    table = EXPERIMENTS.get(ctx.params.get("name") or "")
    return [] if table is None else list(table.settings)
