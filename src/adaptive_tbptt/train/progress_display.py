"""What you see while a run trains: plain lines on standard error, or a live bar on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from types import TracebackType
from typing import Any, TextIO

from ..truncate.controller import TruncationState

LINE_SECONDS = 10.0  # between plain lines inside an epoch; arbitrary
BAR_SECONDS = 0.5  # between updates of the live bar; arbitrary


def describe(numbers: Mapping[str, Any], best: float | None, truncation: TruncationState) -> str:
    """Return the line of an epoch, finished or under way.

    Args:
        numbers: `epoch` and `train_loss`; `valid_loss` too once the epoch is finished.
        best: the lowest validation loss so far.
        truncation: K and the decision behind it.
    """
    parts = [f"epoch {numbers['epoch']}"]
    if numbers["train_loss"] is not None:  # None: every target of the epoch was masked
        parts.append(f"loss {numbers['train_loss']:.4f}")
    if numbers.get("valid_loss") is not None:
        parts.append(f"valid {numbers['valid_loss']:.4f}")
    elif best is not None:
        parts.append(f"best valid {best:.4f}")
    parts.append(f"K {truncation.k}")
    if truncation.decision is not None:
        parts.append(f"beta {truncation.decision.beta:.3f}")
        parts.append(f"bias {truncation.decision.relative_bias:.3g}")
    return "  ".join(parts)


class ProgressDisplay:
    """Show the numbers of a run, its speed and the time left.

    It prints plain lines. Where standard error is a terminal and rich is installed, a live bar
    replaces the lines inside an epoch; the lines that end an epoch stay above it.

    Args:
        total: data steps of the whole run, for the time left; None where it is not known.
        done: data steps trained before, for a resumed run.
        show: False shows nothing.
        file: where to write; None is standard error.
    """

    def __init__(
        self, total: int | None, done: int = 0, *, show: bool = True, file: TextIO | None = None
    ) -> None:
        self.total, self.done, self.start, self.show = total, done, done, show
        self._file = sys.stderr if file is None else file
        self._began = self._last = time.monotonic()
        live = show and self._file.isatty() and find_spec("rich") is not None
        self._bar = LiveBar(total, done, self._file) if live else None

    def __enter__(self) -> ProgressDisplay:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def rate(self) -> float:
        """Data steps per second since the start."""
        return (self.done - self.start) / max(time.monotonic() - self._began, 1e-9)

    @property
    def wants_update(self) -> bool:
        """Whether the last update is old enough for another; reading the loss costs a GPU time."""
        wait = LINE_SECONDS if self._bar is None else BAR_SECONDS
        return self.show and time.monotonic() - self._last >= wait

    def update(self, done: int, text: str) -> None:
        """Show the present numbers."""
        self.done, self._last = done, time.monotonic()
        line = f"{text}  {self.rate:.0f} steps/s"
        if self._bar is not None:
            self._bar.update(done, line)
        else:
            self.say(f"{line}{self._left()}")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._bar is not None:
            self._bar.say(text)
        elif self.show:
            print(text, file=self._file, flush=True)

    def _left(self) -> str:
        if self.total is None or self.rate == 0.0:
            return ""
        seconds = int((self.total - self.done) / self.rate)
        return f"  {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left"


class LiveBar:
    """A line with a bar that rich redraws in place."""

    def __init__(self, total: int | None, done: int, file: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TimeRemainingColumn(),
            console=Console(file=file),
        )
        self._task = self._progress.add_task("", total=total, completed=done)

    def start(self) -> None:
        """Begin to draw."""
        self._progress.start()

    def stop(self) -> None:
        """Leave the last state of the line on the terminal."""
        self._progress.stop()

    def update(self, done: int, line: str) -> None:
        """Show the present numbers."""
        self._progress.update(self._task, completed=done, description=line)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, highlight=False, markup=False)
