"""Ctrl-C, or the notice a cluster sends before it ends a job, between two windows of training."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, ClassVar


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, unless somebody else listens to it."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class DeferredInterrupt:
    """Turns the first SIGINT or SIGTERM into `pending`; the second interrupts at once.

    A SIGTERM that somebody else listens to is left to them. Processes that are forked meanwhile, by
    a pool in a callback say, get the handlers from before: they would not end when told to.
    """

    _open: ClassVar[list[DeferredInterrupt]] = []

    def __init__(self) -> None:
        self.pending = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> DeferredInterrupt:
        if threading.current_thread() is threading.main_thread():
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._note)
            if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _interrupt):
                self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._note)
        self._open.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.remove(self)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            if handler is not None:  # None: not set by Python, so Python cannot set it again
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.pending:
            raise KeyboardInterrupt
        self.pending = True

    @classmethod
    def _hold(cls, how: int) -> None:
        if cls._open:
            signal.pthread_sigmask(how, {signal.SIGINT, signal.SIGTERM})

    @classmethod
    def _in_child(cls) -> None:
        """Put every handler back before a signal that came meanwhile is let through."""
        for interrupt in reversed(cls._open):
            interrupt._restore()
        cls._hold(signal.SIG_UNBLOCK)
        cls._open.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=lambda: DeferredInterrupt._hold(signal.SIG_BLOCK),
        after_in_parent=lambda: DeferredInterrupt._hold(signal.SIG_UNBLOCK),
        after_in_child=DeferredInterrupt._in_child,
    )
