"""The command line of the paper's experiments: `atbptt-paper`.

The library's own command, `atbptt`, diagnoses, checks and reports the runs that `atbptt-paper
train` leaves.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from adaptive_tbptt.cli_completion import one_of
from adaptive_tbptt.cli_errors import OUT, set_up
from adaptive_tbptt.cli_help import Command, Group, HelpAll, examples
from adaptive_tbptt.errors import TrainingError, unknown_name

from .cli_completion import presets_of_table, settings_of_table
from .cli_find_lr import find_lr
from .cli_train import sentences, train_app
from .experiments.paper import EXPERIMENTS

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    cls=Group,
    rich_markup_mode="rich",
    help="The experiments of 'Adaptively truncating backpropagation through time to control "
    "gradient bias': train, make the tables, check the findings.",
    epilog=examples(
        "atbptt-paper train copy --preset quick --delta 0.1",
        "atbptt-paper find-lr copy --preset quick",
        "atbptt-paper reproduce copy-fixed --preset quick --jobs 2",
        "atbptt-paper findings copy-fixed",
    ),
)
app.add_typer(train_app, name="train")
app.command(
    "find-lr",
    cls=Command,
    epilog=examples(
        "atbptt-paper find-lr copy --preset quick",
        "atbptt-paper find-lr language --preset ptb-small --data FOLDER --rule paper",
    ),
)(sentences(find_lr))

Table = Annotated[
    str,
    typer.Argument(
        help=f"Which table: {', '.join(EXPERIMENTS)}.",
        show_default=False,
        autocompletion=one_of(EXPERIMENTS),
    ),
]
CELLS = "Cells"  # the group of options that say how and where cells run


@app.callback()
def main(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Set what holds for every command."""
    set_up(debug)


@app.command(
    cls=Command,
    epilog=examples(
        "atbptt-paper reproduce copy-fixed --preset quick --jobs 2",
        "atbptt-paper reproduce copy-fixed --only K=10 --only delta=0.1 --inits 3",
        "atbptt-paper reproduce copy-fixed --tables-only",
    ),
)
@sentences
def reproduce(
    name: Table,
    preset: Annotated[
        str,
        typer.Option(
            help="paper (its budget) or quick (minutes).", autocompletion=presets_of_table
        ),
    ] = "paper",
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with the data sets; the copy task generates its own."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this setting, such as K=10; may be repeated.",
            autocompletion=settings_of_table,
        ),
    ] = None,
    inits: Annotated[
        int | None,
        typer.Option(help="Initialisations per setting.", show_default="the preset's"),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Epochs per cell.", show_default="the preset's")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Cells side by side, one thread each.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="Where results go.", show_default="results/NAME, or results/NAME-PRESET"),
    ] = None,
    tables_only: Annotated[
        bool, typer.Option("--tables-only", help="Write tables and figures of what is finished.")
    ] = False,
    help_all: HelpAll = False,
    work: Annotated[
        Path | None,
        typer.Option(
            help="Checkpoints of unfinished cells.",
            show_default="runs/, and the last name of --out",
            rich_help_panel=CELLS,
        ),
    ] = None,
    partial: Annotated[
        bool,
        typer.Option(
            "--partial", help="Accept data sets that are incomplete.", rich_help_panel=CELLS
        ),
    ] = False,
    executor: Annotated[
        str,
        typer.Option(
            help="local, or ray: tasks on a cluster.",
            rich_help_panel=CELLS,
            autocompletion=one_of(("local", "ray")),
        ),
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option(help="Ray cluster, such as 10.0.0.1:6379.", rich_help_panel=CELLS),
    ] = None,
) -> None:
    """Run a whole table of the paper cell by cell; finished cells are not run again."""
    from .experiments.cells import read_cells
    from .experiments.paper import experiment
    from .experiments.plots import write_figures
    from .experiments.runner import choose_executor, why_failed
    from .experiments.tables import command_of, write_tables

    run_cells = choose_executor(executor, jobs=jobs, address=address)
    chosen = experiment(name)
    if preset != "paper":  # another experiment than the paper's: its numbers do not belong beside
        title = f"{name}, {preset} preset"
        chosen = dataclasses.replace(chosen, title=title, printed={}, remarks=())
    changes = {"epochs": epochs, "partial": True if partial else None}
    cells = chosen.cells(preset, inits, data, **{k: v for k, v in changes.items() if v is not None})
    if only:
        unknown = [name for name in only if name not in chosen.settings]
        if unknown:
            raise unknown_name(unknown[0], chosen.settings, "setting")
        cells = [cell for cell in cells if cell.config.setting in only]
    suffix = "" if preset == "paper" else f"-{preset}"
    folder = out or Path("results") / f"{name}{suffix}"
    failed: list[str] = []
    if not tables_only:
        stamp = lambda text: OUT.print(text, highlight=False, markup=False)  # noqa: E731
        work = work or Path("runs") / folder.name
        waiting = [c for c in cells if not (folder / "cells" / f"{c.name}.json").exists()]
        if waiting and executor == "local":
            waiting[0].config.streams()  # or every cell would find out that the data are missing
        failed = run_cells(cells, folder, work, say=stamp)
    finished = read_cells(folder)
    if failed and not finished:
        raise TrainingError(f"all cells failed; {why_failed(work, failed[0])}")
    write_tables(chosen, finished, folder, command_of(chosen, preset, finished))
    write_figures(chosen, finished, folder)
    text = (folder / "table.md").read_text("utf-8")
    OUT.print(text, highlight=False, markup=False, soft_wrap=True)
    if failed:
        raise TrainingError(f"{len(failed)} cells failed: {', '.join(failed)}")


@app.command(cls=Command, epilog=examples("atbptt-paper findings copy-fixed"))
@sentences
def findings(
    name: Table,
    results: Annotated[
        Path | None, typer.Option(help="Where the results are.", show_default="results/NAME")
    ] = None,
) -> None:
    """Check the paper's findings against finished cells: yes or no, with the numbers."""
    from .experiments.cells import read_cells
    from .experiments.findings import check_findings
    from .experiments.paper import experiment
    from .experiments.tables import refuse_foreign

    folder = results or Path("results") / name
    chosen, cells = experiment(name), read_cells(folder)
    if not cells:
        raise ValueError(
            f"no finished cells under {folder / 'cells'}: run this in the folder that holds "
            "results/, such as paper/, or pass --results"
        )
    refuse_foreign(chosen, cells, chosen.presets)
    for finding in check_findings(chosen, cells):
        OUT.print(str(finding), highlight=False, markup=False, soft_wrap=True)
