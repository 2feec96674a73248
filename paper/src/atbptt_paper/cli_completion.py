"""What the shell completes of the paper's names: presets, tables, settings of a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import typer

from .experiments.paper import EXPERIMENTS
from .tasks import TASKS

T = TypeVar("T")

__all__ = ["presets_of_table", "presets_of_task", "settings_of_table"]


def presets_of_task(ctx: typer.Context) -> list[str]:
    """Return the presets of the task that is already typed."""
    task = _typed(ctx, TASKS)
    return [] if task is None else list(task.presets)


def presets_of_table(ctx: typer.Context) -> list[str]:
    """Return the presets of the table that is already typed."""
    table = _typed(ctx, EXPERIMENTS)
    return ["paper", "quick"] if table is None else list(table.presets)


def settings_of_table(ctx: typer.Context) -> list[str]:
    """Return the settings of the table that is already typed."""
    table = _typed(ctx, EXPERIMENTS)
    return [] if table is None else list(table.settings)


def _typed(ctx: typer.Context, known: Mapping[str, T]) -> T | None:
    """Return what the command's argument names.

    The option to complete has no value yet, so click leaves the argument among the words that it
    did not parse.
    """
    words = [*ctx.params.values(), *ctx.args]
    return next((known[word] for word in words if isinstance(word, str) and word in known), None)
