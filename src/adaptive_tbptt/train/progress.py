"""What a person sees while training: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ..truncate.controller import TruncationState

INTERVAL = 10.0  # seconds between plain lines; arbitrary


def describe(numbers: Mapping[str, Any], best: float | None, control: TruncationState) -> str:
    """Return the line of an epoch, finished or under way."""
    parts = [f"epoch {numbers['epoch']}"]
    if numbers["train_loss"] is not None:  # None where every target was masked
        parts.append(f"loss {numbers['train_loss']:.4f}")
    if numbers.get("valid_loss") is not None:
        parts.append(f"valid {numbers['valid_loss']:.4f}")
    elif best is not None:
        parts.append(f"best valid {best:.4f}")
    parts.append(f"K {control.k}")
    if control.decision is not None:
        parts.append(f"beta {control.decision.beta:.3f}")
        parts.append(f"bias {control.decision.relative_bias:.3g}")
    return "  ".join(parts)


class ProgressDisplay:
    """Shows loss, metric, K, beta, relative bias, steps per second and time left.

    Args:
        total: data steps of the whole run, for the bar and the time left.
        done: data steps trained on already, for a resumed run.
        show: False shows nothing.
        console: where to; None is standard error.
    """

    def __init__(
        self, total: int | None, done: int = 0, *, show: bool = True, console: Console | None = None
    ) -> None:
        self.console = console or Console(stderr=True)
        self.show = show
        self.total, self.done, self.start = total, done, done
        self.began = self.last = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> ProgressDisplay:
        if self.show and self.console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self.total, completed=self.done)
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
        return (self.done - self.start) / max(time.monotonic() - self.began, 1e-9)

    @property
    def wants_update(self) -> bool:
        """Whether enough time has passed for another look at the numbers."""
        wait = 0.5 if self._bar is not None else INTERVAL
        return self.show and time.monotonic() - self.last >= wait

    def update(self, done: int, text: str) -> None:
        """Show the present numbers."""
        self.done, self.last = done, time.monotonic()
        line = f"{text}  {self.rate:.0f} steps/s"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, description=line)
        elif self.show:
            self.say(f"{line}{self._left()}")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self.show:
            self.console.print(text, highlight=False, markup=False)

    def _left(self) -> str:
        if self.total is None or self.rate == 0.0:
            return ""
        seconds = int((self.total - self.done) / self.rate)
        return f"  {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left"
