"""The command line of the library, for your own models and run folders: `atbptt`.

It needs the extra `cli`. The paper's experiments have a command of their own, `atbptt-paper`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import defaults
from .cli_completion import complete_runs, one_of
from .cli_errors import OUT, errors_as_sentences, set_up, settle_threads
from .cli_help import Command, Group, examples

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    cls=Group,
    rich_markup_mode="rich",
    help="Which truncation length does a recurrent model need, how much history do its predictions "
    "need, and was the promised bias kept?",
    epilog=examples(
        "atbptt diagnose mymodule:factory",
        "atbptt lookback mymodule:factory",
        "atbptt check-bias runs/copy-delta-0.1",
        "atbptt report runs/copy-delta-0.1",
    ),
)
MEASUREMENT = "Measurement"  # the group of options that say how much to measure, and on what
Target = Annotated[
    str,
    typer.Argument(
        help="module:factory, where factory() returns (model, loss_fn, stream), or a run folder.",
        show_default=False,
        autocompletion=complete_runs,
    ),
]
Seconds = Annotated[float, typer.Option(help="Time limit in seconds.", rich_help_panel=MEASUREMENT)]
Split = Annotated[
    str,
    typer.Option(
        help="Data of a run: train, valid or test.",
        rich_help_panel=MEASUREMENT,
        autocompletion=one_of(("train", "valid", "test")),
    ),
]


@app.callback()
def main(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Apply the options of all commands."""
    set_up(debug)


@app.command(
    cls=Command,
    epilog=examples(
        "atbptt diagnose mymodule:factory --losses 35", "atbptt diagnose runs/copy-delta-0.1"
    ),
)
@errors_as_sentences
def diagnose(
    target: Target,
    losses: Annotated[
        int | None,
        typer.Option(
            help="Losses per window of your loop.",
            show_default=f"the run's own, or {defaults.LOSSES}",
        ),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="Relative bias that you tolerate.",
            show_default=f"the run's own, or {defaults.DELTA}",
        ),
    ] = None,
    bound: Annotated[bool, typer.Option("--bound", help="Also give the paper's bound.")] = False,
    memory: Annotated[
        float | None, typer.Option(help="Also say how long a window fits into so many GB.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where to save the figure.")] = Path("bias.png"),
    lags: Annotated[
        int | None,
        typer.Option(
            help="Longest context to compare with.",
            show_default=f"{defaults.LAGS}, or less if the data are shorter",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    seconds: Seconds = defaults.SECONDS,
    segments: Annotated[
        int | None,
        typer.Option(
            help="Windows to backpropagate, instead of --seconds.", rich_help_panel=MEASUREMENT
        ),
    ] = None,
) -> None:
    """Say how much of the gradient a loop misses, and what more context would cost."""
    from .diagnosis import Sampling
    from .diagnosis import diagnose as run_diagnosis
    from .run_targets import open_target

    settle_threads()
    found = open_target(target).changed(losses=losses, delta=delta)
    report = run_diagnosis(
        found.model,
        found.loss_fn,
        found.stream("valid"),
        defaults.LOSSES
        if found.losses is None and not found.k
        else found.losses_per_window(found.k or 0),
        delta=defaults.DELTA if found.delta is None else found.delta,
        lags=lags,
        seconds=seconds,
        segments=segments,
        bound=bound,
        sampling=Sampling(burn_in=found.burn_in, seed=found.seed),
    )
    OUT.print(str(report), highlight=False, markup=False, soft_wrap=True)
    if memory is not None:
        OUT.print(report.memory.sentence(memory), highlight=False, soft_wrap=True)
    report.figure(out)
    OUT.print(f"\npicture: {out}", highlight=False)


@app.command(
    cls=Command,
    epilog=examples(
        "atbptt lookback mymodule:factory --tolerance 0.01", "atbptt lookback runs/copy-delta-0.1"
    ),
)
@errors_as_sentences
def lookback(
    target: Target,
    tolerance: Annotated[
        float, typer.Option(help="Tolerated change of the predictions, as a share of variance.")
    ] = defaults.TOLERANCE,
    longest: Annotated[
        int | None,
        typer.Option(
            help="Longest history to try, in steps.",
            show_default=f"{defaults.HISTORY}, or less if the data are shorter",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where to save the figure.")] = Path("lookback.png"),
    seconds: Seconds = defaults.SECONDS,
    split: Split = "valid",
) -> None:
    """Say how many steps of history the predictions need: sequence length, burn-in, warm-up."""
    from .diagnosis import lookback as run_lookback
    from .run_targets import open_target

    settle_threads()
    found = open_target(target)
    report = run_lookback(
        found.model,
        found.loss_fn,
        found.data(split),
        tolerance=tolerance,
        longest=longest,
        seconds=seconds,
        seed=found.seed,
    )
    OUT.print(str(report), highlight=False, markup=False, soft_wrap=True)
    report.figure(out)
    OUT.print(f"\npicture: {out}", highlight=False)


@app.command(
    "check-bias",
    cls=Command,
    epilog=examples(
        "atbptt check-bias runs/copy-delta-0.1",
        "atbptt check-bias mymodule:factory --k 20 --delta 0.1",
    ),
)
@errors_as_sentences
def check_bias(
    target: Target,
    k: Annotated[
        int | None,
        typer.Option(
            help="K to check; without a run, give one.",
            show_default="that of the run's best epoch",
        ),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="Relative bias that you tolerate; without a run, or if its K was fixed, give one.",
            show_default="the run's own",
        ),
    ] = None,
    losses: Annotated[
        int | None,
        typer.Option(help="Losses per training window (K2).", show_default="the run's own, or K"),
    ] = None,
    lags: Annotated[
        int | None,
        typer.Option(
            help="Lags to compare with.",
            show_default=f"the run's own, or {defaults.PROBE_LAGS}",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    segments: Annotated[
        int,
        typer.Option(
            help="Random segments; more of them narrow the interval.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = defaults.CHECK_SEGMENTS,
    split: Split = "train",
) -> None:
    """Measure the relative bias at K, and compare it with the estimate of each gauge."""
    from .cli_check import check_target
    from .run_targets import open_target

    settle_threads()
    found = open_target(target).changed(delta=delta, k=k, losses=losses, lags=lags)
    check = check_target(found, split=split, segments=segments)
    OUT.print(str(check), highlight=False, markup=False, soft_wrap=True)
    if found.folder is not None:
        check.keep(found.folder)


@app.command(
    cls=Command,
    epilog=examples(
        "atbptt report runs/copy-delta-0.1", "atbptt report runs/copy-delta-0.1 runs/copy-k-10"
    ),
)
@errors_as_sentences
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders.", show_default=False, autocompletion=complete_runs),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where to save the report.",
            show_default="RUN/report.html, or report.html for several runs",
        ),
    ] = None,
) -> None:
    """Write one HTML file about one run or several: curves, decay, asked and achieved bias."""
    from .report import write_run_report

    OUT.print(f"report: {write_run_report(runs, out)}", highlight=False, soft_wrap=True)
