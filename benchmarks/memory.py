"""Peak memory of training against the length of the stream: O(K), not O(T).

Every length is trained in a process of its own, on chunks made as they are read, so that the data
itself is no part of it. Run with `python benchmarks/memory.py [--lengths 10000 1000000]`.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import adaptive_tbptt as at

ROWS, CHUNK = 8, 1000


def peak_mib(steps: int) -> float:
    """Train one epoch of `steps` steps; return by how much the peak exceeds that of a warm-up."""

    def chunks(total: int) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(total // CHUNK):
            x = torch.randn(CHUNK, ROWS, 4)
            yield x, x.roll(3, 0)

    model = nn.GRU(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    control = at.BiasTolerance(delta=0.1, k_max=50, window=60)
    tbptt = at.AdaptiveTBPTT(model, nn.functional.mse_loss, control, estimate_every=5000)

    def train(total: int) -> None:
        for window in tbptt.windows(at.ChunkStream(lambda: chunks(total))):
            window.backward()
            optimizer.step()
            optimizer.zero_grad()

    train(2 * CHUNK)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    train(steps)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only:
        print(peak_mib(options.only))
        return
    print("| steps | peak above a short warm-up, MiB |\n|---|---|")
    for length in options.lengths:
        command = [sys.executable, __file__, "--only", str(length)]
        value = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        print(f"| {length} | {float(value):.1f} |", flush=True)


if __name__ == "__main__":
    main()
