"""The command line of the library, for your own models and run folders: `atbptt`.

It needs the extra `cli`. The paper's experiments have a command of their own, `atbptt-paper`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import defaults
from .cli_errors import OUT, errors_as_sentences, set_up, settle_threads

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Which truncation length does a recurrent model need, how much history do its predictions "
    "need, and was the promised bias kept?",
    epilog="Examples: `atbptt diagnose mymodule:factory`, `atbptt lookback mymodule:factory`, "
    "`atbptt check-bias runs/copy-delta-0.1`, `atbptt report runs/copy-delta-0.1`",
)
Target = Annotated[
    str,
    typer.Argument(
        help="module:factory, where factory() returns (model, loss_fn, stream), or a run folder.",
        show_default=False,
    ),
]


@app.callback()
def main(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Apply the options of all commands."""
    set_up(debug)


@app.command(
    epilog="Examples: `atbptt diagnose mymodule:factory`, `atbptt diagnose runs/copy-delta-0.1`"
)
@errors_as_sentences
def diagnose(
    target: Target,
    losses: Annotated[
        int | None, typer.Option(help="Losses per window of your loop; the run's own, or 35.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Bias that you tolerate; the run's own, or 0.1.")
    ] = None,
    lags: Annotated[
        int | None, typer.Option(help="Longest context to compare with; 256 if the data allow.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time limit.")] = defaults.SECONDS,
    segments: Annotated[
        int | None, typer.Option(help="Windows to backpropagate, instead of --seconds.")
    ] = None,
    bound: Annotated[bool, typer.Option("--bound", help="Also give the paper's bound.")] = False,
    memory: Annotated[
        float | None, typer.Option(help="Also say how long a window fits into so many GB.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where to save the figure.")] = Path("bias.png"),
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
    epilog="Examples: `atbptt lookback mymodule:factory`, `atbptt lookback runs/copy-delta-0.1`"
)
@errors_as_sentences
def lookback(
    target: Target,
    tolerance: Annotated[
        float, typer.Option(help="Tolerated change of the predictions, as a share of variance.")
    ] = defaults.TOLERANCE,
    longest: Annotated[
        int | None,
        typer.Option(help="Longest history to try; 1024, or less if the data are shorter."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time limit.")] = defaults.SECONDS,
    split: Annotated[str, typer.Option(help="Data of a run: train, valid or test.")] = "valid",
    out: Annotated[Path, typer.Option(help="Where to save the figure.")] = Path("lookback.png"),
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
    epilog="Examples: `atbptt check-bias runs/copy-delta-0.1`, "
    "`atbptt check-bias mymodule:factory --k 20 --delta 0.1`",
)
@errors_as_sentences
def check_bias(
    target: Target,
    delta: Annotated[
        float | None, typer.Option(help="Tolerated relative bias; the run's own.")
    ] = None,
    k: Annotated[int | None, typer.Option(help="K to check; that of the run's best epoch.")] = None,
    losses: Annotated[
        int | None, typer.Option(help="Losses per training window (K2); the run's own, or K.")
    ] = None,
    split: Annotated[str, typer.Option(help="Data of a run: train, valid or test.")] = "train",
    segments: Annotated[
        int, typer.Option(help="Random segments; more of them narrow the interval.")
    ] = defaults.CHECK_SEGMENTS,
    lags: Annotated[
        int | None, typer.Option(help="Lags to compare with; the run's own, or 100.")
    ] = None,
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


@app.command(epilog="Example: `atbptt report runs/copy-delta-0.1 runs/copy-k-10`")
@errors_as_sentences
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Default: RUN/report.html; report.html for several runs.")
    ] = None,
) -> None:
    """Write one HTML file about one run or several: curves, decay, asked and achieved bias."""
    from .report import write_run_report

    OUT.print(f"report: {write_run_report(runs, out)}", highlight=False, soft_wrap=True)
