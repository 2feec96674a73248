"""The command line: `atbptt train`, `reproduce`, `findings`, `diagnose`, `report`, `find-lr`."""

from __future__ import annotations

import dataclasses
import inspect
import os
import types
import typing
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from adaptive_tbptt.cli_errors import ERR, say_warning, sentences, set_debug
from adaptive_tbptt.errors import TrainingError

from .experiments.paper import EXPERIMENTS
from .tasks import copy_task, language_task, point_task

TASKS: dict[str, Any] = {
    "copy": copy_task.CopyConfig,
    "language": language_task.LanguageConfig,
    "point-process": point_task.PointConfig,
}


MODULES: dict[str, Any] = {
    "copy": copy_task,
    "language": language_task,
    "point-process": point_task,
}


EXAMPLES = {
    "copy": "atbptt train copy --preset quick --delta 0.1 --out runs/mine",
    "language": "atbptt train language --preset ptb-small --data FOLDER --delta 0.1",
    "point-process": "atbptt train point-process --preset quick --data FOLDER --delta 0.1",
}


_out = Console()


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Truncated backpropagation through time with K chosen from a tolerated gradient bias.",
    epilog="Examples: `atbptt train copy --preset quick --delta 0.1`, "
    "`atbptt reproduce copy-fixed --preset quick --jobs 2`, `atbptt diagnose runs/copy-delta-0.1`",
)


train_app = typer.Typer(no_args_is_help=True, help="Train a model on one of the paper's tasks.")


app.add_typer(train_app, name="train")


@app.callback()
def main(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Set what holds for every command."""
    # Torch reads it at its first tensor: large blocks, such as the logits of a window over a large
    # vocabulary, then come in pages of 2 MiB, and asking for them anew costs less.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    set_debug(debug)
    warnings.showwarning = say_warning


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
    """Add `atbptt train TASK` with an option for every hyperparameter."""
    known = ", ".join(MODULES[task].PRESETS)
    default = next(iter(MODULES[task].PRESETS))

    def command(
        preset: Annotated[str, typer.Option(help="Where values not given come from.")] = default,
        out: Annotated[
            Path | None, typer.Option(help="Run folder; runs/TASK-SETTING by default.")
        ] = None,
        resume: Annotated[
            bool, typer.Option("--resume", help="Go on with the run in --out.")
        ] = False,
        device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
        **given: Any,
    ) -> None:
        from adaptive_tbptt.distributed.ranks import present_ranks, process_group

        from .config import preset_of
        from .experiments.report import SCORES, shown, write_report
        from .experiments.run import train_run

        if (given["delta"] is None) == (given["k"] is None):
            raise ValueError(
                "give exactly one of --delta (tolerated bias, K follows) and --k (fixed)"
            )
        config = preset_of(MODULES[task].PRESETS, preset).changed(**given)
        setting = config.setting.replace("=", "-").lower()
        folder = out or Path("runs") / f"{task}-{setting}"
        with process_group(device) as own_device:
            leads = present_ranks().leads
            if leads and resume and not (folder / "config.toml").exists():
                raise ValueError(f"there is no run to resume in {folder}")
            result = train_run(config, folder, resume=resume, device=own_device)
        if not leads:
            return
        write_report(config, result)
        best, score = result.best, config.score
        _out.print(
            f"\n{config.setting}: best validation {SCORES[score]} {shown(best[f'valid_{score}'])}, "
            f"test {shown(best.get(f'test_{score}'))}, after epoch {result.fit.best_epoch}",
            highlight=False,
        )
        _out.print(str(result.diagnosis), highlight=False, markup=False, soft_wrap=True)
        _out.print(
            f"\nsummary: {folder / 'summary.md'}\npicture: {folder / 'run.png'}", highlight=False
        )

    own = inspect.signature(command, eval_str=True).parameters.values()
    plain = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for p in own
        if p.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    signature = inspect.Signature([*plain, *_options(TASKS[task])])
    wrapped = sentences(command)
    wrapped.__signature__ = signature  # type: ignore[attr-defined]
    wrapped.__annotations__ = {}
    train_app.command(
        task,
        help=f"Train on the {task} task, adaptively (--delta) or with a fixed K (--k). Presets: "
        f"{known}.",
        epilog=f"Example: `{EXAMPLES[task]}`",
    )(wrapped)


for _task in TASKS:
    _add_train(_task)


@app.command(epilog="Example: `atbptt reproduce copy-fixed --preset quick --jobs 2`")
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
    from .config import nearest
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
            raise nearest(unknown[0], chosen.settings, "setting")
        cells = [cell for cell in cells if cell.config.setting in only]
    suffix = "" if preset == "paper" else f"-{preset}"
    folder = out or Path("results") / f"{name}{suffix}"
    failed: list[str] = []
    if not tables_only:
        stamp = lambda text: _out.print(text, highlight=False, markup=False)  # noqa: E731
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
    _out.print(text, highlight=False, markup=False, soft_wrap=True)
    if failed:
        raise TrainingError(f"{len(failed)} cells failed: {', '.join(failed)}")


@app.command(epilog="Example: `atbptt findings copy-fixed`")
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

    chosen, cells = experiment(name), read_cells(results or Path("results") / name)
    refuse_foreign(chosen, cells, chosen.presets)
    for finding in check_findings(chosen, cells):
        _out.print(str(finding), highlight=False, markup=False, soft_wrap=True)


@app.command(
    epilog="Examples: `atbptt diagnose runs/copy-delta-0.1`, `atbptt diagnose mine:factory`"
)
@sentences
def diagnose(
    target: Annotated[
        str,
        typer.Argument(
            help="A run folder, or module:factory where factory() returns (model, loss_fn, stream)."
        ),
    ],
    delta: Annotated[list[float] | None, typer.Option(help="Tolerances; may be repeated.")] = None,
    window: Annotated[
        int | None, typer.Option(help="Lags to measure; the run's own, or 100.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Losses to sample, at least.")] = 256,
    burn_in: Annotated[
        int | None, typer.Option(help="Steps that warm up the state; the run's own, or 20.")
    ] = None,
    gauge: Annotated[
        str | None,
        typer.Option(help="paper, release, parameter or measured; the run's own, or paper."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where to save the figure.")] = Path("decay.png"),
) -> None:
    """Say which K each tolerance needs, and draw the decay curve."""
    from adaptive_tbptt.diagnosis.model_diagnosis import diagnose as run_diagnosis

    from .experiments.target import load_target

    data, how = load_target(target, TASKS, window, burn_in, gauge)
    report = run_diagnosis(*data, delta or (0.9, 0.5, 0.1), samples=samples, **how)
    _out.print(str(report), highlight=False, markup=False, soft_wrap=True)
    report.figure(out)
    _out.print(f"\npicture: {out}", highlight=False)


@app.command("check-bias", epilog="Example: `atbptt check-bias runs/copy-delta-0.1 --delta 0.1`")
@sentences
def check_bias(
    run: Annotated[Path, typer.Argument(help="A run folder.", show_default=False)],
    delta: Annotated[float | None, typer.Option(help="What was asked; the run's own.")] = None,
    k: Annotated[int | None, typer.Option(help="K to check; that of the best epoch.")] = None,
    split: Annotated[str, typer.Option(help="Whose data: train, valid or test.")] = "train",
    segments: Annotated[int, typer.Option(help="Random segments; more, more certain.")] = 32,
    window: Annotated[int | None, typer.Option(help="Lags to compare with; the run's own.")] = None,
) -> None:
    """Measure what the relative bias at a run's K really is, beside what each gauge says."""
    from .experiments.check import check_run
    from .experiments.report import load_run

    asked: dict[str, Any] = {"delta": delta, "k": k, "split": split}
    found = check_run(load_run(run, TASKS), run, **asked, segments=segments, lags=window)
    _out.print(str(found), highlight=False, markup=False, soft_wrap=True)


@app.command(epilog="Example: `atbptt report runs/copy-delta-0.1 runs/copy-k-10`")
@sentences
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="RUN/report.html by default; of several, report.html.")
    ] = None,
) -> None:
    """Write one HTML file about one run or several: curves, decay, asked and achieved bias."""
    from adaptive_tbptt.report.page import write_run_report

    _out.print(f"report: {write_run_report(runs, out)}", highlight=False, soft_wrap=True)


@app.command("find-lr", epilog="Example: `atbptt find-lr copy --preset quick`")
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
    from .config import nearest, preset_of
    from .experiments.find_lr import find_lr as search

    if task not in TASKS:
        raise nearest(task, TASKS, "task")
    presets = MODULES[task].PRESETS
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
    _out.print(table)
    if best is None:
        raise ValueError("every rate diverged; lower --lowest")
    _out.print(f"largest rate that does not diverge at K={config.k}: {best:g}", highlight=False)


@app.command(epilog="Example: `atbptt bench --size copy --turns 10`")
@sentences
def bench(
    size: Annotated[
        list[str] | None, typer.Option(help="smoke, copy, ptb-small or ptb; may be repeated.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="probe, gauges, training, adaptivity; may be repeated.")
    ] = None,
    sweeps: Annotated[
        bool, typer.Option(help="Also the cost against R, K, T and hidden size, as a picture.")
    ] = False,
    turns: Annotated[int, typer.Option(help="Turns each contender takes.")] = 5,
    threads: Annotated[int | None, typer.Option(help="Threads of torch.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for tables and picture; other sizes in it are kept.")
    ] = None,
) -> None:
    """Time contenders side by side in one process; read the ratios, and only on a quiet machine."""
    import torch
    from benchmarks.bench import BENCHMARKS, SIZES
    from benchmarks.bench_sweeps import SWEEPS, plot_sweeps
    from benchmarks.bench_tables import as_markdown, machine, update_csv

    from adaptive_tbptt._torch.number_formats import flushed_denormals

    from .config import nearest

    if turns < 1:
        raise ValueError(f"turns must be at least 1, got {turns}")
    names, kinds = size or ["copy", "ptb-small"], only or list(BENCHMARKS)
    for given, known, what in ((names, SIZES, "size"), (kinds, BENCHMARKS, "benchmark")):
        for name in given:
            if name not in known:
                raise nearest(name, known, what)
    if threads is not None:
        torch.set_num_threads(threads)
    timings, points = [], []
    with flushed_denormals():  # for all contenders alike
        for name in names:
            for kind in kinds:
                ERR.print(f"{kind}, {name}")
                timings += BENCHMARKS[kind](SIZES[name], turns)
        for name, sweep in SWEEPS.items() if sweeps else ():
            ERR.print(f"sweep of {name}")
            points += sweep(turns, "smoke" in names)
    _out.print(as_markdown(timings), highlight=False, markup=False, soft_wrap=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        everything = update_csv(timings, out / "bench.csv")
        (out / "bench.md").write_text(f"{as_markdown(everything)}\n\n{machine()}\n")
        if sweeps:
            plot_sweeps(update_csv(points, out / "sweeps.csv"), out / "sweeps.png")
