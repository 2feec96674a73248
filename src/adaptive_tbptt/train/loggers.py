"""Where metrics go: JSON lines always, TensorBoard when installed, anything through a protocol."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from .files import write_text

Metrics = Mapping[str, Any]


class Logger(Protocol):
    """Anything with these two methods can log a run (wandb, MLflow, a list)."""

    def log(self, metrics: Metrics, step: int) -> None:
        """Take the metrics of one event; `step` counts data steps trained on."""

    def close(self) -> None:
        """Write out what is still held."""


class JsonlLogger:
    """One JSON object a line. A run that is resumed drops lines written after its checkpoint.

    Args:
        path: the file; it is created with its folder.
        keep: number of lines to keep of a file that exists.
    """

    def __init__(self, path: str | Path, keep: int = 0) -> None:
        self.path = Path(path)
        lines = self.path.read_text().splitlines()[:keep] if keep and self.path.exists() else []
        write_text(self.path, "".join(f"{line}\n" for line in lines))
        self.lines = len(lines)
        self._file = self.path.open("a")

    def log(self, metrics: Metrics, step: int) -> None:
        """Write and flush a line; infinities become null, which is JSON."""
        self._file.write(json.dumps(plain({"step": step, **metrics})) + "\n")
        self._file.flush()
        self.lines += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def plain(value: Any) -> Any:
    """Make JSON of what a callback may add: no NaN; scalars of numpy and torch as numbers."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


class TensorBoardLogger:
    """Scalars for TensorBoard; needs `pip install adaptive-tbptt[tensorboard]`."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoard is not installed: pip install 'adaptive-tbptt[tensorboard]'"
            ) from error
        self._writer: Any = SummaryWriter(str(folder))

    def log(self, metrics: Metrics, step: int) -> None:
        """Write every number."""
        for name, value in metrics.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
