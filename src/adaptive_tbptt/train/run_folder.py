"""The folder of a run: `metrics.jsonl`, `starts.jsonl` and `checkpoints/`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .._version import __version__
from ..errors import CheckpointError, TrainingError
from . import checkpoint
from .files import append_line
from .loggers import JsonlLogger, Logger, Metrics, TensorBoardLogger
from .provenance import origin

try:
    import fcntl
except ImportError:  # Windows has no fcntl; there, two processes can write to one folder
    fcntl = None  # type: ignore[assignment]

# What a killed run leaves half-written; only the process that holds the lock writes these.
PARTIAL = ("checkpoints/.*.partial", ".metrics.jsonl.*.partial", ".config.toml.*.partial")

_locks: list[Any] = []  # files that this process holds locked


def _close_locks() -> None:
    for file in _locks:
        file.close()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    # A lock lasts as long as any process has its file open: the workers of a DataLoader would
    # hold it after the death of the run that forked them.
    os.register_at_fork(after_in_child=_close_locks)


class RunFolder:
    """Where a run keeps its metrics and checkpoints.

    Args:
        path: the folder; None keeps nothing.
    """

    def __init__(self, path: str | Path | None) -> None:
        if path is not None:  # fail now, not when the first checkpoint is due
            checkpoint.require_safetensors()
        self.path = None if path is None else Path(path)
        self._metrics: JsonlLogger | None = None

    def file(self, name: str) -> Path | None:
        """Return the path of the checkpoint `name`; None without a folder."""
        return None if self.path is None else self.path / "checkpoints" / f"{name}.safetensors"

    def tensorboard(self, wanted: bool | None) -> list[Logger]:
        """Return a list of at most one logger; None logs if TensorBoard is installed."""
        if wanted is None:
            wanted = self.path is not None and find_spec("tensorboard") is not None
        if not wanted:
            return []
        if self.path is None:
            raise ValueError("tensorboard needs a run_dir to write to")
        with self._writing():
            return [TensorBoardLogger(self.path / "tensorboard")]

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            safe = self.what_is_safe()
            raise TrainingError(f"cannot write to {self.path}: {error}{safe}") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other processes; the system frees the lock when this one dies."""
        if self.path is None or fcntl is None:
            yield
            return
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            # Not through a link, and nothing is emptied: whatever lies there stays as it is.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            file = os.fdopen(os.open(self.path / ".lock", flags, 0o666))
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise TrainingError(
                    f"another process is training in {self.path}: wait for it, or use another "
                    "run_dir"
                ) from error
            except OSError:  # the file system has no locks: train without one
                pass
            _locks.append(file)
            try:
                with self._writing():
                    for partial in (p for name in PARTIAL for p in self.path.glob(name)):
                        partial.unlink(missing_ok=True)
                yield
            finally:
                if file in _locks:  # not so in a forked process
                    _locks.remove(file)

    @property
    def holds_run(self) -> bool:
        """Whether a run has left a checkpoint or metrics here."""
        if self.path is None:
            return False
        metrics = self.path / "metrics.jsonl"
        saved = any((self.path / "checkpoints").glob("*.safetensors"))
        return saved or (metrics.exists() and metrics.stat().st_size > 0)

    def last(self, resume: bool) -> Any:
        """Return the last checkpoint, or None if there is none; refuse to overwrite a run."""
        path = self.file("last")
        if path is None:
            if resume:
                raise ValueError("resume needs a run_dir to resume from")
            return None
        if not self.holds_run:
            return None
        # The first checkpoint is written before the first metrics, so it was there.
        if not path.exists():
            raise TrainingError(
                f"{path} is missing, but {self.path} holds a run: put a copy of the checkpoint "
                "back, or train in another folder"
            )
        if not resume:
            raise TrainingError(
                f"{self.path} already holds a run: continue it with resume=True, or use another "
                "run_dir"
            )
        return checkpoint.load(path)

    def open(self, keep: int = 0, known: Sequence[Metrics] = ()) -> None:
        """Open the metrics and note the start in `starts.jsonl`.

        Args:
            keep: lines of the metrics that belong to the checkpoint.
            known: rows that the checkpoint can restore where lines are lost.
        """
        if self.path is None:
            return
        now = datetime.now(UTC).isoformat(timespec="seconds")
        start = json.dumps({"time": now, **origin(), "adaptive-tbptt": __version__})
        with self._writing():
            append_line(self.path / "starts.jsonl", start)
            self._metrics = JsonlLogger(self.path / "metrics.jsonl", keep, known)

    @property
    def lines(self) -> int:
        """Lines in the file of metrics."""
        return 0 if self._metrics is None else self._metrics.lines

    def log(self, metrics: Metrics, step: int) -> None:
        """Write a line of metrics."""
        if self._metrics is not None:
            with self._writing():
                self._metrics.log(metrics, step)

    def save(self, name: str, nest: Any) -> None:
        """Write a checkpoint."""
        path = self.file(name)
        if path is None:
            return
        if self._metrics is not None:
            with self._writing():
                self._metrics.sync()  # the checkpoint counts their lines
        try:
            checkpoint.save(path, nest)
        except CheckpointError as error:
            raise TrainingError(f"{error}{self.what_is_safe()}") from error

    def what_is_safe(self) -> str:
        """Return the end of an error message: which checkpoint the run can be resumed from."""
        path = self.file("last")
        # os.path, because Path.exists raises for a folder that cannot be read.
        known = path is not None and os.path.exists(path)
        return f". The last good checkpoint is {path}" if known else ""

    def close(self) -> None:
        """Close the metrics."""
        if self._metrics is not None:
            self._metrics.close()
