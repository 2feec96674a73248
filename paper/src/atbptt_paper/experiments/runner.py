"""Run the cells of a table in processes of their own; what is finished is not run again."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from adaptive_tbptt.errors import unknown_name

from .cells import Cell, fingerprint, read_cell, summarise, write_json
from .run import train_run

EXECUTORS = ("local", "ray")


Say = Callable[[str], None]


def choose_executor(
    name: str, *, jobs: int = 1, address: str | None = None
) -> Callable[..., list[str]]:
    """Return `run_cells`, or its twin on a Ray cluster, with the options that are its own."""
    if name not in EXECUTORS:
        raise unknown_name(name, EXECUTORS, "executor")
    if name == "local":
        if address is not None:
            raise ValueError("--address is that of a Ray cluster: add --executor ray")
        return partial(run_cells, jobs=jobs)
    if jobs != 1:
        raise ValueError("--jobs is for --executor local: Ray runs a cell on every free CPU")
    from .ray_runner import run_cells_on_ray

    return partial(run_cells_on_ray, address=address)


def train_cell(cell: Cell, folder: Path) -> dict[str, Any]:
    """Train one cell, resuming what an interrupted run of it left; return its results."""
    import torch

    # One thread whatever --jobs is, so that the numbers do not depend on it.
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    # Processor time: what else the machine does meanwhile does not count.
    clock = time.process_time
    return summarise(cell, train_run(cell.config, folder, resume=True, show=False, clock=clock))


def run_cell(cell: Cell, cells: str, work: str) -> None:
    """Train one cell and write its results."""
    write_json(Path(cells) / f"{cell.name}.json", train_cell(cell, Path(work) / cell.name))


def _worker(cell: Cell, cells: str, work: str) -> None:
    """Run a cell in a child process, its output and errors in a log of its own."""
    os.setsid()  # Ctrl-C reaches the parent alone, which passes it on once
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log = Path(work) / f"{cell.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            run_cell(cell, cells, work)
        except KeyboardInterrupt:
            os._exit(130)
        except BaseException:
            traceback.print_exc(file=file)
            file.flush()
            os._exit(1)


def _end_with_parent() -> None:
    """End this process when its parent is gone, however that ended: nobody would stop it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def run_cells(
    cells: list[Cell], folder: Path, work: Path, *, jobs: int = 1, say: Say = print
) -> list[str]:
    """Run every cell that is not finished; return the names of those that failed.

    Args:
        cells: in the order to run them.
        folder: results; `cells/NAME.json` marks a finished cell.
        work: run folders with checkpoints, so that an interrupted cell goes on where it stopped.
        jobs: processes side by side, one thread each.
        say: told of every start and end.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    store = folder / "cells"
    waiting = unfinished(cells, store, say)
    context = multiprocessing.get_context("spawn")
    running: dict[str, tuple[Any, float]] = {}
    failed: list[str] = []
    interrupted = False
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.pop(0)
                process = context.Process(target=_worker, args=(cell, str(store), str(work)))
                process.start()
                running[cell.name] = (process, time.monotonic())
                say(f"{cell.name}: started")
            time.sleep(0.2)
            for name, (process, began) in list(running.items()):
                if process.is_alive():
                    continue
                del running[name]
                if process.exitcode == 0:
                    shutil.rmtree(work / name, ignore_errors=True)
                    say(f"{name}: finished after {(time.monotonic() - began) / 60:.1f} min")
                else:
                    failed.append(name)
                    say(f"{name}: failed, see {work / name}.log")
    except KeyboardInterrupt:
        interrupted = True
        say("interrupted: waiting for the cells to write their checkpoints")
        raise
    finally:
        for process, _ in running.values():
            if interrupted:
                os.kill(process.pid, signal.SIGINT)
                process.join(60)
            process.terminate()
            process.join()
    return failed


def why_failed(work: Path | None, name: str) -> str:
    """Return the last line that a cell wrote before it failed."""
    log = (work or Path()) / f"{name}.log"
    lines = log.read_text().strip().splitlines() if log.is_file() else []
    return f"{name}: {lines[-1]}" if lines else f"{name} left no log"


def unfinished(cells: list[Cell], store: Path, say: Say) -> list[Cell]:
    """Return the cells that have no results yet."""
    _check_finished(cells, store)
    waiting = [c for c in cells if not (store / f"{c.name}.json").exists()]
    say(f"{len(cells) - len(waiting)} of {len(cells)} cells are finished")
    return waiting


def _check_finished(cells: list[Cell], store: Path) -> None:
    """Refuse to mix cells of other configurations into a table."""
    for cell in cells:
        path = store / f"{cell.name}.json"
        if not path.exists():
            continue
        before, now = read_cell(path).get("config", {}), fingerprint(cell.config)
        # A setting that is newer than the cell has its default in it.
        before = {f.name: f.default for f in dataclasses.fields(cell.config)} | before
        differing = [
            f"{name}: {before[name]} there, {value} here"
            for name, value in now.items()
            if before[name] != value
        ]
        if differing:
            raise ValueError(
                f"{path} was made with another configuration ({'; '.join(differing)}): use "
                "another --out"
            )
