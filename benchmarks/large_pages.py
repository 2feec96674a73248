"""What taking memory in pages of 2 MiB does to training over a large vocabulary, on a CPU.

Each contender trains some windows in a process of its own, because torch reads the option once;
they take turns. Processor time of one thread, the median over windows.

    python benchmarks/large_pages.py --data FOLDER --preset wikitext-2-small --k 10 --k 100
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import torch

import adaptive_tbptt as at
from atbptt_paper.experiments.run import make_optimizer
from atbptt_paper.tasks.language_task import PRESETS

OPTION = "THP_MEM_ALLOC_ENABLE"


def seconds_per_window(preset: str, data: str, k: int, windows: int) -> float:
    """Train some windows as the preset does; return the median of their processor times."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    config = PRESETS[preset].changed(k=k, data=data)
    model, stream = config.model(), config.streams()["train"]
    optimizer = make_optimizer(config, model)
    tbptt = at.AdaptiveTBPTT(model, config.loss_fn, config.controller())
    times, began = [], time.process_time()
    for window in islice(tbptt.windows(stream), windows):
        window.backward()
        optimizer.step()
        optimizer.zero_grad()
        now = time.process_time()
        times.append(now - began)
        began = now
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="the folder of the data set")
    parser.add_argument("--preset", default="wikitext-2-small", choices=PRESETS)
    parser.add_argument("--k", type=int, action="append", help="10 and 100 by default")
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="be one contender: print seconds")
    given = parser.parse_args()
    ks = given.k or [10, 100]
    if given.alone:
        print(seconds_per_window(given.preset, given.data, ks[0], given.windows))
        return
    plain = {name: value for name, value in os.environ.items() if name != OPTION}
    contenders = {"as it is": plain, "large pages": {**plain, OPTION: "1"}}
    print("| K | " + " | ".join(f"{name}, ms" for name in contenders) + " | ratio |")
    print("| --- | " + " | ".join("---" for _ in contenders) + " | --- |")
    for k in ks:
        command = [sys.executable, str(Path(__file__)), "--alone", "--preset", given.preset]
        command += ["--data", given.data, "--windows", str(given.windows), "--k", str(k)]
        found: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(given.turns):
            for name, environment in contenders.items():
                printed = subprocess.check_output(command, env=environment, text=True)
                found[name].append(float(printed))
        before, after = (statistics.fmean(times) * 1000 for times in found.values())
        print(f"| {k} | {before:.1f} | {after:.1f} | {after / before:.2f} |", flush=True)


if __name__ == "__main__":
    main()
