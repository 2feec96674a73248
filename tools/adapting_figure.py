"""Draw the picture of the first page: K adapts, and the bias stays below delta.

`python tools/adapting_figure.py [--epochs N] [--out FILE]` trains on the copy task (preset quick)
with delta = 0.1, one estimate of K per epoch. Right after each estimate, and again at the end of
the epoch that used it, the gradient truncated at K is compared with the one that keeps every lag of
the window, on the same losses: what was estimated beside what is so.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

import adaptive_tbptt as at
from adaptive_tbptt.diagnosis.palette import BLUE, ORANGE, SKY, VERMILION
from atbptt_paper.experiments.run import make_optimizer
from atbptt_paper.labels import label_ends
from atbptt_paper.tasks.copy_task import PRESETS, CopyConfig

SEGMENTS = 32  # arbitrary: times 64 rows, 2048 losses


def mean_gradient(model: Any, loss_fn: Any, segments: list[at.data.Segment], k: int) -> Tensor:
    """Return the mean gradient of the last step's loss of every row, lags 0..k kept."""
    parameters = list(model.parameters())
    total = torch.zeros(sum(p.numel() for p in parameters))
    for segment in segments:
        with torch.no_grad():
            _, state = model.core(segment.inputs[: -k - 1], None)
        features, _ = model.core(segment.inputs[-k - 1 :], state)
        loss = loss_fn(model.head(features[-1:]), segment.targets[-1:])
        parts = torch.autograd.grad(loss, parameters)
        total += torch.cat([part.flatten() for part in parts]) / len(segments)
    return total


def train(config: CopyConfig) -> list[dict[str, Any]]:
    """Train; return what was estimated and measured in every epoch."""
    streams, model = config.streams(), config.model()
    generator = torch.Generator().manual_seed(1)
    tbptt = at.AdaptiveTBPTT(
        model, config.loss_fn, config.controller(), burn_in=config.burn_in, seed=config.seed
    )
    optimizer, clip = make_optimizer(config, model), config.make_clip()
    scale = at.StepScale(optimizer, config.rate_rule)
    assert clip is not None

    def measured_bias() -> float:
        assert tbptt.k is not None
        length = config.burn_in + config.lags + 1
        cut = [streams["train"].random_segment(length, generator) for _ in range(SEGMENTS)]
        full = mean_gradient(model, config.loss_fn, cut, config.lags)
        kept = mean_gradient(model, config.loss_fn, cut, tbptt.k)
        return float((kept - full).norm() / full.norm())

    history = []
    for epoch in range(1, config.epochs + 1):
        row: dict[str, Any] = {"epoch": epoch, "estimated": math.nan, "at_choice": math.nan}
        estimates = len(tbptt.history)
        for window in tbptt.windows(streams["train"]):
            if len(tbptt.history) > estimates:
                estimates = len(tbptt.history)
                row["estimated"], row["at_choice"] = (
                    tbptt.history[-1].relative_bias,
                    measured_bias(),
                )
            window.backward()
            clip(model.parameters(), window.losses)
            scale.step(window)
            optimizer.step()
            optimizer.zero_grad()
        loss = at.evaluate(model, config.loss_fn, streams["valid"])
        row |= {"k": tbptt.k, "perplexity": math.exp(loss), "at_end": measured_bias()}
        history.append(row)
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    return history


def draw(history: list[dict[str, Any]], delta: float, path: Path) -> None:
    """Draw perplexity, K and the bias against epochs."""
    figure = Figure(figsize=(7.0, 6.4), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(2, 2, 3))

    def column(name: str) -> list[float]:
        return [row[name] for row in history]

    epochs = column("epoch")
    top.plot(epochs, column("perplexity"), color=BLUE)
    top.set_ylabel("validation\nperplexity")
    measured = [bias for bias in column("at_choice") if math.isfinite(bias)]
    kept = sum(bias <= delta for bias in measured)
    figure.suptitle(
        f"Copy task (6 symbols), LSTM with 40 units: measured when K was chosen,\n"
        f"the bias is at most delta = {delta:g} in {kept} of {len(measured)} epochs",
        fontsize=11,
    )
    middle.step(epochs, column("k"), color=BLUE, where="mid")
    middle.set_ylabel("truncation\nlength K (steps)")
    middle.set_ylim(bottom=0)
    bottom.axhline(delta, color=ORANGE, ls="--", lw=2, label=f"tolerated: {delta:g}")
    bottom.plot(epochs, column("estimated"), "o", color=BLUE, ms=4, label="estimated")
    bottom.plot(
        epochs, column("at_choice"), "x-", color=VERMILION, ms=5, lw=1,
        label="measured, K chosen",
    )  # fmt: skip
    bottom.plot(
        epochs, column("at_end"), "^", color=SKY, ms=5, mfc="none",
        label="measured, epoch's end",
    )  # fmt: skip
    bottom.set_yscale("log")
    bottom.set_ylabel("relative bias of\nthe gradient (ratio)")
    bottom.set_xlabel("epochs")
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.25, lw=0.5)
    label_ends(bottom)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Train and draw."""
    parser = argparse.ArgumentParser(description="Draw the picture of the first page.")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--delta", type=float, default=0.1)
    parser.add_argument("--out", type=Path, default=Path("docs/img/adapting.png"))
    options = parser.parse_args()
    config = PRESETS["quick"].changed(delta=options.delta, epochs=options.epochs)
    draw(train(config), options.delta, options.out)


if __name__ == "__main__":
    main()
