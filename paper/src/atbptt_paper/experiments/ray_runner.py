"""Run the cells of a table as Ray tasks, on this machine or on a cluster."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adaptive_tbptt.train import write_text

from .cells import Cell, as_json
from .runner import Say, train_cell, unfinished


def run_cells_on_ray(
    cells: list[Cell],
    folder: Path,
    work: Path,
    *,
    address: str | None = None,
    retries: int = 3,
    patience: float = 10.0,
    say: Say = print,
) -> list[str]:
    """Run every cell that is not finished as a Ray task; return the names of those that failed.

    Each task takes one CPU and has a process of its own, so the numbers are those of `run_cells`.
    Results travel back through Ray and are written here as they arrive: no shared disk is needed.
    The machines of the cluster need this package and the library, in the same versions, and the
    data: the paths that the cells name are made absolute and must exist on every machine.

    A task trains in a folder below the temporary folder of its machine, named after `work`. The
    name can be guessed, so the task refuses a folder that another user owns or may write to. When
    its process is killed, Ray runs the cell again, and where that happens on the same machine, it
    goes on from the last checkpoint. So does the same call after a Ctrl-C.

    Args:
        cells: in the order to run them.
        folder: results; `cells/NAME.json` marks a finished cell.
        work: where `NAME.log` says why a cell failed.
        address: of a running cluster, such as `10.0.0.1:6379`. None takes RAY_ADDRESS from the
            environment, and starts Ray on this machine for the time of the call where that is not
            set. A connection that is open already is used as it is. Whether a token is asked for
            is Ray's matter: since 2.59 the first start on a machine writes ~/.ray/auth_token, and
            a cluster that was started where that exists wants RAY_AUTH_MODE=token here too.
        retries: how often a cell is run again after its process or its machine was lost. Ray
            itself decides how often one is that it killed for want of memory.
        patience: seconds to wait for a cluster to answer.
        say: told of every end.
    """
    ray = _import_ray()
    store = folder / "cells"
    waiting = unfinished(cells, store, say)
    if not waiting:
        return []
    with _connected(ray, address, patience):
        say(f"{len(waiting)} cells, {ray.cluster_resources().get('CPU', 0):g} CPUs")
        # A process for every cell, as locally: nothing of one can leak into the next.
        task = ray.remote(num_cpus=1, max_calls=1, max_retries=retries)(_train_here)
        place = _place(work)
        running = {
            task.options(name=cell.name).remote(_with_whole_path(cell), place): cell.name
            for cell in waiting
        }
        return _gather(ray, running, store, work, say)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "Ray is not installed: pip install 'adaptive-tbptt-paper[ray]'"
        ) from error
    return ray


def _train_here(cell: Cell, place: str) -> str:
    """Train one cell on the machine of a worker; return its results as JSON."""
    base = Path(tempfile.gettempdir()) / place
    _claim(base)
    os.chdir(base)  # the caches that a configuration names with a relative path belong here too
    results = as_json(train_cell(cell, base / cell.name))
    shutil.rmtree(base / cell.name, ignore_errors=True)
    return results


def _claim(folder: Path) -> None:
    """Create a folder for this user alone, or refuse one that others could have filled."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{folder} is not a folder that only you can write to, so someone else may have put "
            "checkpoints there: remove it, or set TMPDIR to a folder of your own on that machine"
        )


def _gather(ray: Any, running: dict[Any, str], store: Path, work: Path, say: Say) -> list[str]:
    """Write results as they arrive; return the names of the cells that failed."""
    failed: list[str] = []
    try:
        while running:
            done, _ = ray.wait(list(running), num_returns=1)
            name = running[done[0]]
            try:
                results = ray.get(done[0])
            except ray.exceptions.RayError as error:  # its own, or the end of its last process
                plain = re.sub(r"\x1b\[\d+m", "", str(error))  # Ray colours its tracebacks
                write_text(work / f"{name}.log", f"{plain}\n")
                failed.append(name)
                say(f"{name}: failed, see {work / name}.log")
            else:
                write_text(store / f"{name}.json", results)
                say(f"{name}: finished after {json.loads(results)['seconds'] / 60:.1f} min")
            del running[done[0]]
    except KeyboardInterrupt:
        say("interrupted: waiting for the cells to write their checkpoints")
        if running:
            _cancel(ray, list(running))
        raise
    finally:
        if running:
            _cancel(ray, list(running), force=True)
    return failed


def _cancel(ray: Any, refs: list[Any], force: bool = False) -> None:
    """Cancel tasks and wait for them, or with `force` end their processes.

    Those that have ended are left out: Ray 2.60 aborts this process where a task is cancelled just
    as its result arrives.
    """
    _, pending = ray.wait(refs, num_returns=len(refs), timeout=0)
    for ref in pending:
        ray.cancel(ref, force=force)
    if not force:
        ray.wait(refs, num_returns=len(refs), timeout=60)


def _place(work: Path) -> str:
    """Return the folder name of a table on the workers: the same for the same `work`."""
    key = f"{platform.node()}:{work.resolve()}"
    return f"atbptt-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _with_whole_path(cell: Cell) -> Cell:
    """Workers have another working directory."""
    data = getattr(cell.config, "data", None)
    return (
        cell if data is None else Cell(cell.config.changed(data=os.path.abspath(data)), cell.init)
    )


@contextmanager
def _connected(ray: Any, address: str | None, patience: float) -> Iterator[None]:
    """Connect to a cluster, or start one, and undo it; leave a caller's own connection alone."""
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    if address not in ("local", "auto"):
        _check_reachable(address, patience)
    ray.init(address, log_to_driver=False, logging_level=logging.WARNING, **options)
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str, patience: float) -> None:
    """Ask before Ray does, which tries for minutes where nothing or something else answers.

    Ray speaks HTTP/2: its server answers the client's preface with settings of its own, a frame of
    type 4 (RFC 9113, section 3.4). Where Ray is set to use TLS, to be connected has to do.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"address must be HOST:PORT of a Ray cluster or auto, got {address!r}")
    hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
    try:
        with socket.create_connection((host, int(port)), timeout=patience) as connection:
            if os.environ.get("RAY_USE_TLS", "0") not in ("1", "true"):
                connection.sendall(hello)
                if connection.makefile("rb").read(9)[3:4] != b"\4":
                    raise OSError("something else listens there")
    except OSError as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address} ({error}): `ray start --head` on its first "
            "machine prints the address"
        ) from error
