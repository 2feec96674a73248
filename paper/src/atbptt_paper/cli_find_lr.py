"""`atbptt-paper find-lr`: try learning rates in short runs, and say which one to take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from adaptive_tbptt.cli_completion import one_of
from adaptive_tbptt.cli_errors import ERR, OUT, settle_threads
from adaptive_tbptt.errors import unknown_name

from .cli_completion import presets_of_task
from .config import preset_of
from .tasks import TASKS

__all__ = ["find_lr"]

TRIALS = "Trials"  # the group of options that say what to try


def find_lr(
    task: Annotated[
        str,
        typer.Argument(
            help=f"Which task: {', '.join(TASKS)}.",
            show_default=False,
            autocompletion=one_of(TASKS),
        ),
    ],
    preset: Annotated[
        str | None,
        typer.Option(
            help="Where all other values come from.",
            show_default="the first one of the task",
            autocompletion=presets_of_task,
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Data of the task, as for train.")] = None,
    rule: Annotated[
        str,
        typer.Option(
            help="Among the rates that do not diverge, take the one with the lowest validation "
            "loss (loss), or the largest (paper).",
            autocompletion=one_of(("loss", "paper")),
        ),
    ] = "loss",
    k: Annotated[
        int | None,
        typer.Option(
            help="Fixed K to train with.",
            show_default="the preset's K_0",
            rich_help_panel=TRIALS,
        ),
    ] = None,
    updates: Annotated[int, typer.Option(help="Updates per rate.", rich_help_panel=TRIALS)] = 300,
    lowest: Annotated[
        int,
        typer.Option(
            help="Smallest rate, as a power of ten.", min=-30, max=30, rich_help_panel=TRIALS
        ),
    ] = -3,
    highest: Annotated[
        int,
        typer.Option(
            help="Largest rate, as a power of ten.", min=-30, max=30, rich_help_panel=TRIALS
        ),
    ] = 2,
) -> None:
    """Train shortly at several learning rates, each a power of ten, and choose one of them."""
    from .experiments.find_lr import RULES, choose

    if task not in TASKS:
        raise unknown_name(task, TASKS, "task")
    if rule not in RULES:
        raise unknown_name(rule, RULES, "rule")
    if lowest > highest:
        raise ValueError(f"--lowest {lowest} is above --highest {highest}")
    presets = TASKS[task].presets
    base = preset_of(presets, preset or next(iter(presets)))
    # Incomplete data will do: the losses are compared with each other, and none is published.
    partial = {"partial": True} if hasattr(base, "partial") else {}
    config = base.changed(k=base.k_init if k is None else k, data=data, **partial)
    settle_threads()
    trials = _try_all(config, [10.0**e for e in range(lowest, highest + 1)], updates)
    table = Table("rate", "first loss", "last loss", "validation loss", "updates", "diverged")
    for t in trials:
        verdict = "yes" if t.diverged else "no"
        losses = (f"{loss:.4f}" for loss in (t.first, t.last, t.valid))
        table.add_row(f"{t.lr:g}", *losses, str(t.updates), verdict)
    OUT.print(table)
    best = choose(trials, rule)
    if best is None:
        raise ValueError("every rate diverged; lower --lowest")
    stayed = [t for t in trials if not t.diverged]
    why = f"the lowest validation loss ({best.valid:.4f})" if rule == "loss" else "the largest rate"
    OUT.print(
        f"take {best.lr:g}: {why} of the {len(stayed)} of {len(trials)} rates that did not diverge "
        f"at K={config.k}",
        highlight=False,
        soft_wrap=True,
    )
    if best is trials[-1]:
        OUT.print("no larger rate was tried: raise --highest", highlight=False)
    if best is trials[0] and rule == "loss":
        OUT.print("no smaller rate was tried: lower --lowest", highlight=False)


def _try_all(config: Any, rates: Sequence[float], updates: int) -> list[Any]:
    """Try every rate; show a bar on a terminal, and a line per rate elsewhere."""
    from .experiments.find_lr import try_rate

    trials: list[Any] = []
    columns = TextColumn("{task.description}"), BarColumn(bar_width=20), TimeRemainingColumn()
    with Progress(*columns, console=ERR, transient=True, disable=not ERR.is_terminal) as progress:
        bar = progress.add_task("", total=len(rates) * updates)
        for i, lr in enumerate(rates):
            # A rate that diverges early leaves updates out.
            progress.update(bar, completed=i * updates, description=f"rate {lr:g}")
            trials.append(try_rate(config, lr, updates, lambda: progress.advance(bar)))
            if not ERR.is_terminal:
                ERR.print(
                    f"rate {lr:g}, {i + 1} of {len(rates)}: validation loss {trials[-1].valid:.4f}",
                    highlight=False,
                )
    return trials
