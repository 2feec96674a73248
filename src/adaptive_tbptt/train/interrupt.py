"""Signals that wait until the window under way is trained: Ctrl-C, and SIGTERM from a cluster."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar

GRACE = 5.0  # seconds, for one that is busy rather than stuck; arbitrary


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Raise `KeyboardInterrupt` on SIGTERM, unless the process has a handler of its own for it."""
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
    """Set `pending` on the first SIGINT or SIGTERM; raise `KeyboardInterrupt` on the second.

    Python raises it when the main thread is back from torch. Where it waits there for a process
    that hangs, a thread ends this one `GRACE` seconds after the second signal.

    If the process has its own handler for SIGTERM, that handler stays. Processes forked inside the
    block, by a pool in a callback for instance, get the handlers from before: with ours they would
    only set a flag that nobody reads, and never end.

    Attributes:
        pending: whether a signal has come.
    """

    _open: ClassVar[list[DeferredInterrupt]] = []  # blocks under way, for the hooks of fork

    def __init__(self) -> None:
        self.pending = False
        self._before: dict[int, Any] = {}
        self._pipe = -1  # where Python notes every signal at once, whatever the main thread does
        self._left = threading.Event()

    def __enter__(self) -> DeferredInterrupt:
        if threading.current_thread() is threading.main_thread():
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._note)
            if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _interrupt):
                self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._note)
            self._open_pipe()
        self._open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.remove(self)
        self._left.set()
        self._restore()

    def _open_pipe(self) -> None:
        before = signal.set_wakeup_fd(-1)
        if before != -1:  # an event loop listens, which matters more
            signal.set_wakeup_fd(before)
            return
        reader, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()

    def _watch(self, reader: int) -> None:
        """End the process if the main thread does not, after a second signal."""
        seen = 0
        with os.fdopen(reader, "rb", buffering=0) as signals:
            while seen < 2 and (number := signals.read(1)):
                seen += number[0] in self._before
        if seen == 2 and not self._left.wait(GRACE):
            try:
                os.write(2, b"ended by a second signal, while torch did not come back\n")
            finally:
                os._exit(130)

    def _restore(self) -> None:
        if self._pipe != -1:
            signal.set_wakeup_fd(-1)
            os.close(self._pipe)
            self._pipe = -1
        for number, handler in self._before.items():
            if handler is not None:  # None: set outside Python, which cannot set it again
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.pending:
            raise KeyboardInterrupt
        self.pending = True

    @classmethod
    def _hold(cls, how: int) -> None:
        """Block the signals during a fork, until the child has its own handlers back."""
        if cls._open:
            signal.pthread_sigmask(how, {signal.SIGINT, signal.SIGTERM})

    @classmethod
    def _in_child(cls) -> None:
        # Handlers first: unblocking delivers a signal that came during the fork.
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
