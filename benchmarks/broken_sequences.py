"""How much of a copy perplexity comes from sequences that are broken off.

The released arrays hold stretches in which the next marker comes before a sequence is recalled.
Given run folders, the loss at their best parameters is taken apart into the steps of whole
sequences and the others.

    python benchmarks/broken_sequences.py RUN [RUN ...] --out paper/results/copy-variable/broken.md
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from adaptive_tbptt.train import load_checkpoint, load_model, write_text
from atbptt_paper.tasks.copy_data import BLANK, MARKER, Symbols
from atbptt_paper.tasks.copy_task import CopyConfig


class Parts(NamedTuple):
    """Mean losses over all steps, over whole sequences and over the others, and their shares."""

    every: float
    whole: float
    broken: float
    steps_broken: float
    loss_broken: float


def whole_steps(inputs: Symbols, low: int, high: int) -> NDArray[np.bool_]:
    """Tell which steps belong to whole sequences of the released layout.

    Args:
        inputs: `(steps, rows)`.
        low: the smallest m.
        high: the largest m.
    """
    whole = np.zeros(inputs.shape, dtype=bool)
    for row, symbols in enumerate(inputs.T):
        starts = np.flatnonzero(symbols == MARKER)
        for start, stop in zip(starts, [*starts[1:], len(symbols)], strict=True):
            m, odd = divmod(stop - start, 2)
            said, rest = np.split(symbols[start:stop], [m])
            right = not odd and low <= m <= high and (said != BLANK).all() and (rest == BLANK).all()
            whole[start:stop, row] = right
    return whole


def take_apart(config: CopyConfig, model: torch.nn.Module, split: str) -> Parts:
    """Return the losses of a split."""
    stream = config.streams()[split]
    segment = stream.read(len(stream))
    inputs, targets = segment.inputs, segment.targets.long()
    with torch.no_grad():
        logits = model.eval()(inputs)[0]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").numpy()
    low = config.m if config.m_min is None else config.m_min
    whole = whole_steps(inputs.numpy(), low, config.m).flatten()
    return Parts(
        losses.mean(),
        losses[whole].mean(),
        losses[~whole].mean(),
        (~whole).mean(),
        losses[~whole].sum() / losses.sum(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders of the copy task")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "| setting | init | valid PPL | whole sequences | broken ones | test PPL | whole sequences "
        "| broken ones | broken: steps | broken: loss |",
        "|" + " --- |" * 10,
    ]
    for folder in options.runs:
        config = CopyConfig.from_toml(folder / "config.toml")
        path = folder / "checkpoints" / "best.safetensors"
        model = config.model()
        load_model(model, load_checkpoint(path), path)
        valid, test = (take_apart(config, model, split) for split in ("valid", "test"))
        perplexities = [f"{math.exp(x):.3f}" for part in (valid, test) for x in part[:3]]
        shares = [f"{test.steps_broken:.0%}", f"{test.loss_broken:.0%}"]
        cells = [config.setting, str(config.seed), *perplexities, *shares]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if options.out is not None:
        write_text(options.out, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
