"""Peak memory: of training against the length of the stream, of a probe against its lags.

Training holds O(K), not O(T); a probe holds its norms and a number of steps that does not depend
on the lags. Every figure is taken in a process of its own. The numbers are in
`benchmarks/results/speed/memory.md`.

    python benchmarks/memory.py --out benchmarks/results/speed
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import adaptive_tbptt as at
from adaptive_tbptt.train.provenance import commit
from atbptt_paper.tasks.sequence_model import symbol_loss
from contenders import Size
from timing_tables import machine

ROWS, CHUNK = 8, 1000


def peak() -> int:
    """Return the highest memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def held() -> int:
    """Return what this process holds now, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def training(steps: int) -> int:
    """Train one epoch of `steps` steps; return by how much the peak exceeds that of a warm-up."""

    def chunks(total: int) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(total // CHUNK):
            x = torch.randn(CHUNK, ROWS, 4)
            yield x, x.roll(3, 0)

    model = nn.GRU(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    control = at.BiasTolerance(delta=0.1, k_max=50, lags=60)
    tbptt = at.AdaptiveTBPTT(model, nn.functional.mse_loss, control, estimate_every=5000)

    def train(total: int) -> None:
        for window in tbptt.windows(at.ChunkStream(lambda: chunks(total))):
            window.backward()
            optimizer.step()
            optimizer.zero_grad()

    train(2 * CHUNK)
    before = peak()
    train(steps)
    return peak() - before


def probing(lags: int) -> int:
    """Probe an LSTM of 128 units, 64 rows; return by how much the peak exceeds what was held."""
    size = Size("", 128, 1, 20, 64, lags, (), 0, 0)
    model = at.model.as_recurrent(size.model())
    inputs, targets, *_ = size.stream(lags).segment(0, lags)
    at.probe(model, symbol_loss, inputs[:20], targets[:20])
    before = held()
    at.probe(model, symbol_loss, inputs, targets)
    return peak() - before


MEASURES = {
    "training, length of the stream (above a short warm-up)": training,
    "probe, lags R, LSTM 128, 64 rows (above what was held)": probing,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--lags", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--out", type=Path, help="folder for memory.md")
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        name, steps = options.only
        print(MEASURES[name](int(steps)))
        return
    lines = ["| what | steps | peak, MiB |", "|---|---|---|"]
    for name, values in zip(MEASURES, (options.lengths, options.lags), strict=True):
        for steps in values:
            command = [sys.executable, __file__, "--only", name, str(steps)]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            lines.append(f"| {name} | {steps} | {int(printed) / 2**20:.1f} |")
            print(lines[-1], flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "memory.md").write_text(
            "\n".join([*lines, "", f"{machine()}, commit {commit()}"]) + "\n"
        )


if __name__ == "__main__":
    main()
