"""Chunks that a framework hands over one at a time, as the iterable that `ChunkStream` reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from ..data.stream import Segment
from ..loop.window import Window


class Starved(Exception):
    """A window needs a chunk that the framework has not handed over yet."""


class ChunkFeed(Iterator[Segment]):
    """The chunks of one epoch, as they come.

    If the next chunk has not come yet, reading raises `Starved`. This leaves the stream and its
    windows as they were, so the same window can be asked for again later.
    """

    def __init__(self) -> None:
        self._waiting: deque[Segment] = deque()
        self._closed = False

    def put(self, chunk: Segment, last: bool) -> None:
        """Add the next chunk; say whether it is the last of the epoch."""
        self._waiting.append(chunk)
        self._closed = last

    def __next__(self) -> Segment:
        """Return the next chunk."""
        if self._waiting:
            return self._waiting.popleft()
        raise StopIteration if self._closed else Starved


def until_starved(windows: Iterable[Window]) -> Iterator[Window]:
    """Yield windows until one needs a chunk that has not come yet."""
    try:
        yield from windows
    except Starved:
        return
