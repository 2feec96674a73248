"""`atbptt-paper train TASK`, with an option for every hyperparameter of the task."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from adaptive_tbptt.cli_completion import one_of
from adaptive_tbptt.cli_errors import OUT, errors_as_sentences, settle_threads
from adaptive_tbptt.cli_help import Command, Group, HelpAll, examples

from .config import GROUPS, RUN, TrainConfig, preset_of
from .tasks import TASKS

__all__ = ["sentences", "train_app"]

EXAMPLES = {
    "copy": (
        "atbptt-paper train copy --preset quick --delta 0.1",
        "atbptt-paper train copy --preset quick --k 10 --out runs/ten",
        "atbptt-paper train copy --preset quick --help-all",
    ),
    "language": (
        "atbptt-paper train language --preset ptb-small --data FOLDER --delta 0.1",
        "atbptt-paper train language --preset ptb-small --help-all",
    ),
    "point-process": (
        "atbptt-paper train point-process --preset quick --data FOLDER --delta 0.1",
        "atbptt-paper train point-process --preset quick --help-all",
    ),
}

sentences = functools.partial(
    errors_as_sentences,
    interrupted="interrupted; train --resume, or the same reproduce, goes on from here",
)

train_app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Train a model on one of the paper's tasks.",
    epilog=examples(*(lines[0] for lines in EXAMPLES.values())),
)


def _options(task: str) -> list[inspect.Parameter]:
    """Make an option of every field of a task's configuration, the common ones first.

    The defaults are those of the task's first preset; `_preset_first` takes those of another.
    """
    config, presets = TASKS[task]
    base, hints = next(iter(presets.values())), typing.get_type_hints(config)
    common: list[inspect.Parameter] = []
    others: list[inspect.Parameter] = []
    for f in dataclasses.fields(config):
        kind, group, choices = hints[f.name], f.metadata["group"], f.metadata["choices"]
        if isinstance(kind, types.UnionType):
            kind = next(part for part in typing.get_args(kind) if part is not type(None))
        either: Any = kind | None
        text = f.metadata["help"]
        option = typer.Option(
            help=f"{text[0].upper()}{text[1:]}.",
            rich_help_panel=group,
            autocompletion=one_of(choices) if choices else None,
        )
        (others if group else common).append(
            inspect.Parameter(
                f.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=getattr(base, f.name),
                annotation=Annotated[either, option],
            )
        )
    others.sort(key=lambda p: GROUPS.index(p.annotation.__metadata__[0].rich_help_panel))
    return [*common, *others]


def _preset_first(presets: Mapping[str, TrainConfig]) -> Callable[..., str]:
    """Return what reads `--preset` before all other options: their defaults are its values."""

    def use(ctx: typer.Context, value: str) -> str:
        if not ctx.resilient_parsing:  # completion
            preset = preset_of(presets, value)
            for parameter in ctx.command.params:
                if hasattr(preset, parameter.name or ""):
                    parameter.default = getattr(preset, parameter.name or "")
        return value

    return sentences(use)


def _add(task: str) -> None:
    """Add `atbptt-paper train TASK`."""
    config, presets = TASKS[task]

    def command(
        preset: Annotated[
            str,
            typer.Option(
                help=f"Where the defaults come from: {', '.join(presets)}.",
                is_eager=True,
                callback=_preset_first(presets),
                autocompletion=one_of(presets),
            ),
        ] = next(iter(presets)),
        out: Annotated[
            Path | None,
            typer.Option(help="Run folder.", show_default=f"runs/{task}-SETTING"),
        ] = None,
        resume: Annotated[
            bool, typer.Option("--resume", help="Go on with the run in --out.")
        ] = False,
        device: Annotated[
            str,
            typer.Option(help="Device: cpu, cuda, ...", autocompletion=one_of(("cpu", "cuda"))),
        ] = "cpu",
        help_all: HelpAll = False,
        rank_timeout: Annotated[
            float,
            typer.Option(
                help="Seconds until a process of torchrun counts as hung.", rich_help_panel=RUN
            ),
        ] = 300.0,
        **values: Any,
    ) -> None:
        from adaptive_tbptt.distributed import present_ranks, process_group

        from .experiments.report import SCORES, shown, write_report
        from .experiments.run import train_run

        chosen = config(**values)
        chosen.require_one_way()
        setting = chosen.setting.replace("=", "-").lower()
        folder = out or Path("runs") / f"{task}-{setting}"
        settle_threads()
        with process_group(device, rank_timeout) as own_device:
            leads = present_ranks().leads
            if leads and resume and not (folder / "config.toml").exists():
                raise ValueError(f"there is no run to resume in {folder}")
            result = train_run(chosen, folder, resume=resume, device=own_device)
        if not leads:
            return
        write_report(chosen, result)
        best, score = result.best, chosen.score
        OUT.print(
            f"\n{chosen.setting}: best validation {SCORES[score]} {shown(best[f'valid_{score}'])}, "
            f"test {shown(best.get(f'test_{score}'))}, after epoch {result.fit.best_epoch}",
            highlight=False,
        )
        OUT.print(str(result.diagnosis), highlight=False, markup=False, soft_wrap=True)
        OUT.print(
            f"\nsummary: {folder / 'summary.md'}\npicture: {folder / 'run.png'}", highlight=False
        )

    signature = inspect.signature(command, eval_str=True, locals=locals())
    plain = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for p in signature.parameters.values()
        if p.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    first, *rest = plain
    wrapped = sentences(command)
    wrapped.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [first, *_options(task), *rest]
    )
    wrapped.__annotations__ = {}
    train_app.command(
        task,
        cls=Command,
        help=f"Train on the {task} task, adaptively (--delta) or with a fixed K (--k).",
        epilog=examples(*EXAMPLES[task]),
    )(wrapped)


for _task in TASKS:
    _add(_task)
