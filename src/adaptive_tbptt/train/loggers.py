"""Where metrics go: JSON lines, TensorBoard, or any object with the two methods of `Logger`."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from .files import write_text

Metrics = Mapping[str, Any]


class Logger(Protocol):
    """What `Trainer(loggers=...)` takes: wrap wandb, MLflow or a list in these two methods."""

    def log(self, metrics: Metrics, step: int) -> None:
        """Receive the metrics of one event; `step` is the number of data steps trained on."""

    def close(self) -> None:
        """Write what is still buffered; the run has ended."""


class JsonlLogger:
    """Write one JSON object per line.

    Args:
        path: the file; its folder is created if need be.
        keep: how many lines of an existing file to keep. A resumed run drops the lines written
            after its checkpoint, because it will write them again.
        known: rows to restore where fewer than `keep` lines are left; a warning says so.

    Attributes:
        lines: number of lines in the file.
    """

    def __init__(self, path: str | Path, keep: int = 0, known: Sequence[Metrics] = ()) -> None:
        self.path = Path(path)
        lines = [line for line in _lines(self.path)[:keep] if _row(line) is not None]
        if len(lines) < keep:
            lines = _restored(self.path, lines, keep, known)
        write_text(self.path, "".join(f"{line}\n" for line in lines))
        self.lines = len(lines)
        self._file = self.path.open("a")

    def log(self, metrics: Metrics, step: int) -> None:
        """Write a line and flush it; NaN and infinities become null, since JSON has neither."""
        self._file.write(json.dumps(plain({"step": step, **metrics})) + "\n")
        self._file.flush()
        self.lines += 1

    def sync(self) -> None:
        """Wait until all lines are on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _row(line: str) -> dict[str, Any] | None:
    """Return the row that a line holds; None where the line is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and {"step", "event", "epoch"} <= row.keys() else None


def _restored(path: Path, lines: list[str], keep: int, known: Sequence[Metrics]) -> list[str]:
    """Add the rows that are known and not among the lines, in the order of training."""
    rows = [(row, line) for line in lines if (row := _row(line))]
    left = {(row["event"], row["step"]) for row, _ in rows}
    missing = [plain(row) for row in known if (row["event"], row["step"]) not in left]
    rows += [(row, json.dumps(row)) for row in missing]
    rows.sort(key=lambda pair: (pair[0]["step"], pair[0]["epoch"]))
    lost = keep - len(rows)
    warnings.warn(
        f"{path} has {len(lines)} of the {keep} lines that its checkpoint counts: restored "
        f"{len(missing)} from the checkpoint, which holds only K, beta, the bias and the outcome "
        f"of an estimate{f'; {lost} are lost' if lost > 0 else ''}",
        stacklevel=2,
    )
    return [line for _, line in rows]


def plain(value: Any) -> Any:
    """Convert numpy and torch scalars to numbers, NaN and infinities to None, as JSON needs."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


class TensorBoardLogger:
    """Write scalars for TensorBoard; needs `pip install 'adaptive-tbptt[tensorboard]'`."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoard is not installed: pip install 'adaptive-tbptt[tensorboard]'"
            ) from error
        self._writer: Any = SummaryWriter(str(folder))

    def log(self, metrics: Metrics, step: int) -> None:
        """Write every metric that is a number."""
        for name, value in metrics.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
