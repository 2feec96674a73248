"""What a single run leaves for a person: one figure and one page."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from adaptive_tbptt.train import write_text

from ..config import TrainConfig
from ..labels import label_ends, leave_out_the_start
from ..palette import BLUE, GREY, VERMILION
from .run import RunResult

SCORES = {"ppl": "perplexity", "nll": "negative log-likelihood"}


def write_report(config: TrainConfig, result: RunResult) -> None:
    """Write `summary.md`, `run.png` and `decay.png` into the run folder."""
    for name in ("run.png", "decay.png"):  # where there is a link, what it leads to stays
        (result.folder / name).unlink(missing_ok=True)
    run_figure(config, result.fit.history).savefig(result.folder / "run.png", dpi=130)
    result.diagnosis.figure(result.folder / "decay.png")
    write_text(result.folder / "summary.md", summary(config, result))


def summary(config: TrainConfig, result: RunResult) -> str:
    """Return the page as Markdown."""
    best, last = result.best, result.fit.history[-1]
    ks = [row["k"] for row in result.fit.history]
    score, name = config.score, SCORES[config.score]
    return f"""# {config.setting}

| | |
|---|---|
| best validation {name} | {shown(best[f"valid_{score}"])} (epoch {result.fit.best_epoch}) |
| test {name} there | {shown(best.get(f"test_{score}"))} |
| epochs, data passes | {result.fit.epochs}, {last["data_passes"]:.2f} |
| updates, seconds | {last["updates"]}, {last["seconds"]:.0f} |
| K: first, smallest, largest, last | {ks[0]}, {min(ks)}, {max(ks)}, {ks[-1]} |

At the best parameters:

```
{result.diagnosis}
```

![{name}, K and relative bias](run.png)

![decay of the gradient](decay.png)
"""


def shown(value: float | None) -> str:
    """Return a score as text."""
    return "too large to tell" if value is None else f"{value:.4f}"


def run_figure(config: TrainConfig, history: list[dict[str, Any]]) -> Figure:
    """Perplexity, K and the estimated relative bias against data passes, one above the other."""
    figure = Figure(figsize=(7.0, 7.5), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    passes = [row["data_passes"] for row in history]
    score = config.score
    training = [config.valid_metrics(row["train_loss"])[f"valid_{score}"] for row in history]
    top.plot(passes, training, color=GREY, ls=":", label="training")
    valid, tested = (
        [
            np.nan if row.get(f"{split}_{score}") is None else row[f"{split}_{score}"]
            for row in history
        ]
        for split in ("valid", "test")
    )
    top.plot(passes, valid, color=BLUE, label="validation")
    top.plot(passes, tested, color=VERMILION, ls="--", label="test at best")
    top.set_ylabel(SCORES[score])
    best = min((v for v in valid if np.isfinite(v)), default=np.nan)
    title = f"{config.setting}: best validation {SCORES[score]} {best:.4g}"
    if leave_out_the_start(top, 10.0 if score == "ppl" else np.inf):  # as in the tables' figures
        title += " (starts above)"
    top.set_title(title, parse_math=False)  # a name may hold any characters
    label_ends(top)
    middle.step(passes, [row["k"] for row in history], color=BLUE, where="post")
    middle.set_ylabel("truncation length K (steps)")
    middle.set_ylim(bottom=0)
    biases = [np.nan if row["relative_bias"] is None else row["relative_bias"] for row in history]
    if np.isfinite(biases).any():
        bottom.plot(passes, biases, "o-", color=BLUE, ms=4, label="estimated\nbound at K")
        bottom.set_ylim(0, 1.2 * max(np.nanmax(biases), config.delta or 0.0))
    if config.delta is not None:
        bottom.axhline(config.delta, color=VERMILION, ls="--", label=f"delta = {config.delta:g}")
    else:
        bottom.text(0.5, 0.5, "K is fixed: not estimated", transform=bottom.transAxes, ha="center")
    bottom.set_ylabel("relative bias")
    bottom.set_xlabel("data passes (epochs, probes included)")
    label_ends(bottom)
    return figure
