"""The command line of the paper's experiments: `atbptt-paper`.

The library's own command, `atbptt`, diagnoses, checks and reports the runs that `atbptt-paper
train` leaves.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from adaptive_tbptt.cli_errors import OUT, errors_as_sentences, set_up, settle_threads
from adaptive_tbptt.errors import TrainingError, unknown_name

from .experiments.paper import EXPERIMENTS
from .tasks import TASKS

EXAMPLES = {
    "copy": "atbptt-paper train copy --preset quick --delta 0.1 --out runs/mine",
    "language": "atbptt-paper train language --preset ptb-small --data FOLDER --delta 0.1",
    "point-process": "atbptt-paper train point-process --preset quick --data FOLDER --delta 0.1",
}


sentences = functools.partial(
    errors_as_sentences,
    interrupted="interrupted; train --resume, or the same reproduce, goes on from here",
)


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="The experiments of 'Adaptively truncating backpropagation through time to control "
    "gradient bias': train, make the tables, check the findings.",
    epilog="Examples: `atbptt-paper train copy --preset quick --delta 0.1`, "
    "`atbptt-paper reproduce copy-fixed --preset quick --jobs 2`",
)


train_app = typer.Typer(no_args_is_help=True, help="Train a model on one of the paper's tasks.")


app.add_typer(train_app, name="train")


@app.callback()
def main(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Set what holds for every command."""
    set_up(debug)


def _options(config: type) -> list[inspect.Parameter]:
    """Make a command-line option of every field of a configuration, None meaning 'as preset'."""
    hints = typing.get_type_hints(config)
    parameters = []
    for f in dataclasses.fields(config):
        kind = hints[f.name]
        if isinstance(kind, types.UnionType):
            kind = next(part for part in typing.get_args(kind) if part is not type(None))
        either: Any = kind | None
        annotation = Annotated[either, typer.Option(help=f.metadata["help"])]
        parameters.append(
            inspect.Parameter(
                f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
        )
    return parameters


def _add_train(task: str) -> None:
    """Add `atbptt-paper train TASK` with an option for every hyperparameter."""
    presets = TASKS[task].presets

    def command(
        preset: Annotated[str, typer.Option(help="Where values not given come from.")] = next(
            iter(presets)
        ),
        out: Annotated[
            Path | None, typer.Option(help="Run folder; runs/TASK-SETTING by default.")
        ] = None,
        resume: Annotated[
            bool, typer.Option("--resume", help="Go on with the run in --out.")
        ] = False,
        device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
        rank_timeout: Annotated[
            float, typer.Option(help="Seconds until a process of torchrun counts as hung.")
        ] = 300.0,
        **given: Any,
    ) -> None:
        from adaptive_tbptt.distributed import present_ranks, process_group

        from .config import preset_of
        from .experiments.report import SCORES, shown, write_report
        from .experiments.run import train_run

        if (given["delta"] is None) == (given["k"] is None):
            raise ValueError(
                "give exactly one of --delta (tolerated bias, K follows) and --k (fixed)"
            )
        config = preset_of(presets, preset).changed(**given)
        setting = config.setting.replace("=", "-").lower()
        folder = out or Path("runs") / f"{task}-{setting}"
        settle_threads()
        with process_group(device, rank_timeout) as own_device:
            leads = present_ranks().leads
            if leads and resume and not (folder / "config.toml").exists():
                raise ValueError(f"there is no run to resume in {folder}")
            result = train_run(config, folder, resume=resume, device=own_device)
        if not leads:
            return
        write_report(config, result)
        best, score = result.best, config.score
        OUT.print(
            f"\n{config.setting}: best validation {SCORES[score]} {shown(best[f'valid_{score}'])}, "
            f"test {shown(best.get(f'test_{score}'))}, after epoch {result.fit.best_epoch}",
            highlight=False,
        )
        OUT.print(str(result.diagnosis), highlight=False, markup=False, soft_wrap=True)
        OUT.print(
            f"\nsummary: {folder / 'summary.md'}\npicture: {folder / 'run.png'}", highlight=False
        )

    own = inspect.signature(command, eval_str=True).parameters.values()
    plain = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for p in own
        if p.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    signature = inspect.Signature([*plain, *_options(TASKS[task].config)])
    wrapped = sentences(command)
    wrapped.__signature__ = signature  # type: ignore[attr-defined]
    wrapped.__annotations__ = {}
    train_app.command(
        task,
        help=f"Train on the {task} task, adaptively (--delta) or with a fixed K (--k). Presets: "
        f"{', '.join(presets)}.",
        epilog=f"Example: `{EXAMPLES[task]}`",
    )(wrapped)


for _task in TASKS:
    _add_train(_task)


@app.command(epilog="Example: `atbptt-paper reproduce copy-fixed --preset quick --jobs 2`")
@sentences
def reproduce(
    name: Annotated[str, typer.Argument(help=f"Which table: {', '.join(EXPERIMENTS)}.")],
    preset: Annotated[str, typer.Option(help="paper (its budget) or quick (minutes).")] = "paper",
    inits: Annotated[int | None, typer.Option(help="Initialisations per setting.")] = None,
    jobs: Annotated[int, typer.Option(help="Cells side by side, one thread each.")] = 1,
    epochs: Annotated[int | None, typer.Option(help="Instead of the preset's.")] = None,
    executor: Annotated[str, typer.Option(help="local, or ray: tasks on a cluster.")] = "local",
    address: Annotated[str | None, typer.Option(help="Ray cluster, such as 10.0.0.1:6379.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this setting, such as K=10; may be repeated.")
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Accept data sets that are incomplete.")
    ] = False,
    data: Annotated[Path | None, typer.Option(help="Folder with the data sets.")] = None,
    out: Annotated[Path | None, typer.Option(help="Results; results/NAME by default.")] = None,
    work: Annotated[Path | None, typer.Option(help="Checkpoints of unfinished cells.")] = None,
    tables_only: Annotated[
        bool, typer.Option("--tables-only", help="Write tables and figures of what is finished.")
    ] = False,
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


@app.command(epilog="Example: `atbptt-paper findings copy-fixed`")
@sentences
def findings(
    name: Annotated[str, typer.Argument(help="Which table.")],
    results: Annotated[Path | None, typer.Option(help="results/NAME by default.")] = None,
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
            f"no finished cells under {folder / 'cells'}: run this where results/ lies, such as in "
            "paper/, or give --results"
        )
    refuse_foreign(chosen, cells, chosen.presets)
    for finding in check_findings(chosen, cells):
        OUT.print(str(finding), highlight=False, markup=False, soft_wrap=True)


@app.command("find-lr", epilog="Example: `atbptt-paper find-lr copy --preset quick`")
@sentences
def find_lr(
    task: Annotated[str, typer.Argument(help="copy, language or point-process.")],
    preset: Annotated[str | None, typer.Option(help="Where the other values come from.")] = None,
    k: Annotated[int | None, typer.Option(help="Fixed K to try them at; K_0 by default.")] = None,
    data: Annotated[str | None, typer.Option(help="Data of the task.")] = None,
    updates: Annotated[int, typer.Option(help="Updates per trial.")] = 300,
    lowest: Annotated[
        int, typer.Option(help="Exponent of the smallest rate.", min=-30, max=30)
    ] = -3,
    highest: Annotated[
        int, typer.Option(help="Exponent of the largest rate.", min=-30, max=30)
    ] = 2,
) -> None:
    """Choose the step size as the paper does: the largest power of ten that does not diverge."""
    from .config import preset_of
    from .experiments.find_lr import find_lr as search

    if task not in TASKS:
        raise unknown_name(task, TASKS, "task")
    presets = TASKS[task].presets
    base = preset_of(presets, preset or next(iter(presets)))
    # Incomplete data will do: the losses are compared with each other, and none is published.
    partial = {"partial": True} if hasattr(base, "partial") else {}
    config = base.changed(k=base.k_init if k is None else k, data=data, **partial)
    if lowest > highest:
        raise ValueError(f"--lowest {lowest} is above --highest {highest}")
    best, trials = search(config, [10.0**e for e in range(lowest, highest + 1)], updates)
    table = Table("rate", "first loss", "last loss", "updates", "diverged")
    for t in trials:
        verdict = "yes" if t.diverged else "no"
        table.add_row(f"{t.lr:g}", f"{t.first:.4f}", f"{t.last:.4f}", str(t.updates), verdict)
    OUT.print(table)
    if best is None:
        raise ValueError("every rate diverged; lower --lowest")
    OUT.print(f"largest rate that does not diverge at K={config.k}: {best:g}", highlight=False)
