"""What you see while a run trains: plain lines on standard error, or a live bar on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, TextIO

from ..truncate.controller import TruncationState

LINE_SECONDS = 10.0  # between plain lines inside an epoch; arbitrary
BAR_SECONDS = 0.5  # between updates of the live bar; arbitrary


def describe(numbers: Mapping[str, Any], best: float | None, truncation: TruncationState) -> str:
    """Return the line of an epoch from its metrics, or from `epoch` and `train_loss` so far."""
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

    It prints plain lines. If standard error is a terminal and rich is installed, a live bar
    replaces the lines inside an epoch; the lines that end an epoch stay above it.

    Args:
        total: data steps of the whole run, for the time left; None if it is not known.
        done: data steps trained before, for a resumed run.
        show: False shows nothing.
        file: where to write; None is standard error.
    """

    def __init__(
        self, total: int | None, done: int = 0, *, show: bool = True, file: TextIO | None = None
    ) -> None:
        self._file = sys.stderr if file is None else file
        show = show and self._file is not None  # Python has no stderr where it was closed before
        self._total, self._start, self._show = total, done, show
        self._began = self._last = time.monotonic()
        live = show and self._file.isatty() and find_spec("rich") is not None
        self._bar = _live_bar(total, done, self._file) if live else None

    def __enter__(self) -> ProgressDisplay:
        if self._bar is not None:
            self._try(self._bar.start)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._try(self._bar.stop)

    def _try(self, show: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Show something; where nobody can see it any more, show nothing from then on."""
        try:
            show(*args, **options)
        except (OSError, ValueError, SystemExit):  # SystemExit: rich, where a pipe is closed
            self._show, self._bar = False, None

    @property
    def wants_update(self) -> bool:
        """Whether the last update is old enough for another; reading the loss costs a GPU time."""
        wait = LINE_SECONDS if self._bar is None else BAR_SECONDS
        return self._show and time.monotonic() - self._last >= wait

    def update(self, done: int, text: str) -> None:
        """Show the present numbers and the data steps per second since the start."""
        self._last = time.monotonic()
        rate = (done - self._start) / max(self._last - self._began, 1e-9)
        line = f"{text}  {rate:.0f} steps/s"
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._try(self._bar.update, task, completed=done, description=line)
            return
        if self._total is not None and rate > 0.0:
            seconds = int((self._total - done) / rate)
            line += f"  {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left"
        self.say(line)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._bar is not None:
            self._try(self._bar.console.print, text, highlight=False, markup=False)
        elif self._show:
            self._try(print, text, file=self._file, flush=True)


def _live_bar(total: int | None, done: int, file: TextIO) -> Any:
    """Return a line with a bar that rich redraws in place."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TimeRemainingColumn(),
        console=Console(file=file),
        transient=True,
    )
    bar.add_task("", total=total, completed=done)
    return bar
