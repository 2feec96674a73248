"""Why our copy perplexities differ from the published ones: how the release carries the state.

The release trains in pieces of 500 steps. Between pieces its state misses K - 1 steps, and after
the first window of a piece it sees K - 1 steps again. Both ways are trained here by a plain loop
from one initialisation, with windows of 2K - 1 steps, losses on the last K. With `--like` K changes
from epoch to epoch as it did in a finished cell, so that the slip comes at other places each time;
with `--delta` it is estimated at the start of every epoch.

    python benchmarks/carried_state.py --data FILE.npz
    python benchmarks/carried_state.py --data FILE.npz --like CELL.json
    python benchmarks/carried_state.py --data FILE.npz --delta 0.9 --state released
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import adaptive_tbptt as at
from atbptt_paper.experiments.run import make_optimizer
from atbptt_paper.tasks.copy_data import read_arrays
from atbptt_paper.tasks.copy_task import PRESETS, CopyConfig

PIECE = 500
Windows = Callable[[int, int], Iterator[tuple[int, int, int]]]


def exact(steps: int, k: int) -> Iterator[tuple[int, int, int]]:
    """Begin and end of each window, and after how many of its steps the state is handed on."""
    yield 0, k, 1
    for i in range(1, steps // k):
        yield i * k - (k - 1), (i + 1) * k, k


def released(steps: int, k: int) -> Iterator[tuple[int, int, int]]:
    """The same as the authors' code has it: the state of a window need not be where it begins."""
    piece = PIECE // k * k
    for begin in range(0, steps, piece):
        yield begin, begin + k, k
        for i in range(1, min(piece, steps - begin) // k):
            yield begin + i * k - (k - 1), begin + (i + 1) * k, k


def perplexity(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    with torch.no_grad():
        logits, _ = model(inputs)
    return math.exp(F.cross_entropy(logits.flatten(0, 1), targets.flatten().long()))


def estimates(config: CopyConfig, model: torch.nn.Module) -> Iterator[int]:
    """K of every epoch as Algorithm 1 has it: first K_0, then what a probe of the model says."""
    stream = config.streams()["train"]
    tbptt = at.AdaptiveTBPTT(
        model, config.loss_fn, config.controller(), burn_in=config.burn_in, seed=config.seed
    )
    yield config.k_init
    while True:
        tbptt.estimate(stream)
        assert tbptt.k is not None
        yield tbptt.k


def train(
    config: CopyConfig, ks: list[int] | None, windows: Windows
) -> Iterator[tuple[int, int, float]]:
    """Train an epoch with each K; yield epoch, K and the best validation perplexity so far."""
    assert config.data is not None
    splits, model = read_arrays(Path(config.data)), config.model()
    train, valid = (tuple(map(torch.from_numpy, splits[name])) for name in ("train", "valid"))
    optimizer = make_optimizer(config, model)
    best = math.inf
    for epoch, k in zip(range(1, config.epochs + 1), ks or estimates(config, model), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * math.sqrt(k)
        state: Any = None
        for begin, end, keep in windows(len(train[0]), k):
            inputs, targets = (part[begin:end] for part in train)
            early, state = model(inputs[:keep], state)
            late, _ = model(inputs[keep:], state) if keep < end - begin else (early[:0], None)
            logits = torch.cat([early, late])[-k:]
            optimizer.zero_grad()
            F.cross_entropy(logits.flatten(0, 1), targets[-k:].flatten().long()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 / k)
            optimizer.step()
            state = tuple(part.detach() for part in state)
        best = min(best, perplexity(model, *valid))
        yield epoch, k, best


def table(runs: Path) -> str:
    """Best validation perplexity so far, one row per epoch and one column per run."""
    found: dict[str, dict[str, str]] = {}
    with runs.open(newline="") as file:
        for setting, state, seed, epoch, k, best in list(csv.reader(file))[1:]:
            shown = best if setting.startswith("K=") else f"{best} (K={k})"
            found.setdefault(epoch, {})[f"{setting}, {state}, {seed}"] = shown
    columns = sorted({c for bests in found.values() for c in bests})
    lines = [["epoch", *columns], ["---"] * (len(columns) + 1)]
    lines += [[epoch, *(bests.get(c, "") for c in columns)] for epoch, bests in found.items()]
    title = "# Best validation perplexity so far, by K, how the state is carried, initialisation"
    return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="the released arrays, fixed m (.npz)")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--k", type=int, default=10)
    chosen.add_argument("--like", type=Path, help="a cell (.json) whose K to use, epoch by epoch")
    chosen.add_argument("--delta", type=float, help="estimate K, as the release does")
    parser.add_argument("--state", choices=["exact", "released"], help="both by default")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("paper/results/carried-state"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    config = PRESETS["paper"].changed(data=given.data, epochs=given.epochs)
    ks: list[int] | None = None
    if given.like is not None:
        cell = json.loads(given.like.read_text())
        setting, ks = f"K of {cell['setting']}", cell["curves"]["k"]
        config = config.changed(k=ks[0], epochs=min(given.epochs, len(ks)))
    elif given.delta is not None:
        setting, config = f"delta={given.delta:g}", config.changed(delta=given.delta)
    else:
        setting, ks = f"K={given.k}", [given.k] * given.epochs
        config = config.changed(k=given.k)
    ways = [w for w in (exact, released) if given.state in (None, w.__name__)]
    given.out.mkdir(parents=True, exist_ok=True)
    runs = given.out / "runs.csv"
    begun = runs.exists()
    done = {tuple(line.split(",")[:4]) for line in runs.read_text().splitlines()} if begun else ()
    last = str(config.epochs // 10 * 10)
    with runs.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not begun:
            writer.writerow(["setting", "state", "seed", "epoch", "K", "best valid perplexity"])
        for seed in range(given.seeds):
            for windows in ways:
                if (setting, windows.__name__, str(seed), last) in done:
                    continue
                for epoch, k, best in train(config.changed(seed=seed), ks, windows):
                    if epoch % 10 == 0:
                        row = [setting, windows.__name__, seed, epoch, k, f"{best:.4f}"]
                        writer.writerow(row)
                        file.flush()
                        print(*row, flush=True)
    (given.out / "table.md").write_text(table(runs))


if __name__ == "__main__":
    main()
