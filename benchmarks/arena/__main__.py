"""`python -m benchmarks.arena`: every method on every task, at equal processor time.

    python -m benchmarks.arena rates                  # three learning rates each, on seed 100
    python -m benchmarks.arena run                    # the cells of the table, at the best rate
    python -m benchmarks.arena cell copy ours --seed 10
    python -m benchmarks.arena table                  # regret and figures from the cells there are
    python -m benchmarks.arena pairs copy ours 'context 10' --until 0.0953

The cells of a task and a seed are a heat: they train in turn, a slice of processor time each. Two
heats run side by side, one thread each, on a machine that does nothing else. A heat of which every
cell is there is not run again; `--ray` runs heats on a Ray cluster instead. Times are compared
within a heat alone, so a new method needs a heat with all others.
"""

from __future__ import annotations

import argparse
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .methods import METHODS
from .pairs import compare
from .regret import write_table
from .runner import RATE_SEED, Job, best_rate, heats, rates_of, run_local, run_ray
from .tasks import HELD_BACK, TASKS

OUT = Path(__file__).parents[1] / "results" / "arena"
SEEDS, FRESH = (10, 11, 12), (13, 14)


def jobs(options: Any) -> Iterator[Job]:
    """Yield the cells that a command asks for."""
    tasks = options.task or list(TASKS if not options.held_back else HELD_BACK)
    methods = options.method or [m for m in METHODS if m != "full"]
    if options.command == "rates":
        for task in tasks:
            for method in methods:
                for rate in rates_of(task, method):
                    yield Job(task, method, rate, RATE_SEED)
        return
    for task in tasks:
        for seed in options.seed or (FRESH if options.fresh else SEEDS):
            for method in methods:
                rate = options.rate or best_rate(options.out, task, method)
                if rate is None:
                    raise SystemExit(f"first find the learning rate: rates --task {task}")
                yield Job(task, method, rate, seed)


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["rates", "run", "cell", "table", "pairs"])
    parser.add_argument(
        "cell",
        nargs="*",
        help="with `cell`: a task and a method; with `pairs`: a task and two methods",
    )
    parser.add_argument("--task", action="append", help="only this one; may be repeated")
    parser.add_argument("--method", action="append", help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, action="append")
    parser.add_argument("--rate", type=float, help="instead of the best of the three")
    parser.add_argument("--held-back", action="store_true", help="the tasks no design has seen")
    parser.add_argument("--fresh", action="store_true", help="the seeds no design has seen")
    parser.add_argument("--share", type=float, default=1.0, help="of the budget; may be above 1")
    parser.add_argument("--until", type=float, default=-math.inf, help="end a run at this loss")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if options.command == "cell":
        if len(options.cell) != 2:
            parser.error("cell takes a task and a method")
        options.task, options.method = [options.cell[0]], [options.cell[1]]
    if options.command == "pairs":
        if len(options.cell) != 3:
            parser.error("pairs takes a task and two methods")
        target = options.until if math.isfinite(options.until) else None
        print("\n".join(compare(options.out, *options.cell, target, RATE_SEED)))
        return
    if options.command != "table":
        commit = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        cells = options.out / "cells"
        todo = [h for h in heats(jobs(options)) if not all((cells / j.name).exists() for j in h)]
        print(f"{len(todo)} heats to run", flush=True)
        limits = {"share": options.share, "until": options.until}
        if options.ray:
            run_ray(todo, options.out, commit, **limits)
        elif todo:
            run_local(todo, options.out, commit, options.processes, **limits)
    if options.command in ("run", "table"):
        write_table(options.out, RATE_SEED, seeds=SEEDS, fresh=FRESH)


if __name__ == "__main__":
    main()
