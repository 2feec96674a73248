"""Which cells and heats there are, and running them: in local processes, or on a Ray cluster."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from .cell import run_heat
from .methods import METHODS
from .tasks import HELD_BACK, TASKS

RATE_SEED = 100  # chooses the learning rate; its cells do not count
RATE_SHARE = 0.4  # of the budget: near the half at which targets are set


class Job(NamedTuple):
    """A cell to run."""

    task: str
    method: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """The name of its file."""
        method = "-".join("".join(c if c.isalnum() else " " for c in self.method).split())
        return f"{self.task}--{method}--{self.rate:.3g}--{self.seed}.json"


def rates_of(task: str, method: str) -> list[float]:
    """Return the three learning rates of a method on a task."""
    return {**TASKS, **HELD_BACK}[task].rates(METHODS[method](0).losses)


def best_rate(out: Path, task: str, method: str) -> float | None:
    """Return the rate whose run on the rate seed ended lowest; None where runs are missing."""
    ends = {}
    for rate in rates_of(task, method):
        path = out / "cells" / Job(task, method, rate, RATE_SEED).name
        if not path.exists():
            return None
        curve = json.loads(path.read_text())["curve"]
        tail = [value for _, _, value in curve[-3:]]
        ends[rate] = sum(tail) / len(tail)
    return min(ends, key=lambda rate: (ends[rate] != ends[rate], ends[rate]))


def heats(jobs: Iterable[Job]) -> list[list[Job]]:
    """Put cells of the same task and seed together: they train in turn, in one process."""
    found: dict[tuple[str, int], list[Job]] = {}
    for job in jobs:
        found.setdefault((job.task, job.seed), []).append(job)
    return list(found.values())


def finish(heat: list[Job], out: Path, commit: str, **limits: float) -> str:
    """Run the cells of a heat within the limits of `run_heat`; return a line about each."""
    task, seed = heat[0].task, heat[0].seed
    if seed == RATE_SEED:
        limits = {"share": RATE_SHARE}
    named = f"{task}, seed {seed}, {datetime.now(UTC):%Y-%m-%d %H:%M:%S}"
    (out / "cells").mkdir(parents=True, exist_ok=True)
    lines = []
    results = run_heat(task, [(job.method, job.rate) for job in heat], seed, **limits)
    for job, found in zip(heat, results, strict=True):
        path = out / "cells" / job.name
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({**found, "heat": named, "commit": commit}) + "\n")
        partial.replace(path)
        lines.append(f"{job.name}: {found['curve'][-1][2]:.4f} after {found['updates']} updates")
    return "\n".join(lines)


def run_local(
    todo: list[list[Job]], out: Path, commit: str, processes: int, **limits: float
) -> None:
    """Run heats in local processes, one thread each."""
    os.environ["OMP_NUM_THREADS"] = "1"  # numpy's threads too: they wait busily
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=1) as pool:
        found = [pool.apply_async(finish, (heat, out, commit), limits) for heat in todo]
        for i, one in enumerate(found):
            print(f"[{i + 1}/{len(found)}] {one.get()}", flush=True)


def run_ray(todo: list[list[Job]], out: Path, commit: str, **limits: float) -> None:
    """Run heats on a Ray cluster whose machines share the results folder."""
    import ray

    ray.init(address="auto")
    remote = ray.remote(num_cpus=1)(finish)
    waiting = [remote.remote(heat, out.resolve(), commit, **limits) for heat in todo]
    while waiting:
        (done,), waiting = ray.wait(waiting)
        print(ray.get(done), flush=True)
