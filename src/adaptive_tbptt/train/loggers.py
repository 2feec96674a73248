"""Where metrics go: JSON lines, TensorBoard, or any object with the two methods of `Logger`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
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

    Attributes:
        lines: number of lines in the file.
    """

    def __init__(self, path: str | Path, keep: int = 0) -> None:
        self.path = Path(path)
        lines = self.path.read_text().splitlines()[:keep] if keep and self.path.exists() else []
        write_text(self.path, "".join(f"{line}\n" for line in lines))
        self.lines = len(lines)
        self._file = self.path.open("a")

    def log(self, metrics: Metrics, step: int) -> None:
        """Write a line and flush it; NaN and infinities become null, since JSON has neither."""
        self._file.write(json.dumps(plain({"step": step, **metrics})) + "\n")
        self._file.flush()
        self.lines += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()


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
