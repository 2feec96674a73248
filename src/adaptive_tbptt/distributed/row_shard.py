"""Some of the rows of a stream, for one of several processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..data.nest import map_leaves
from ..data.segment import Segment
from ..data.stream import Stream


class RowShard(Stream):
    """This process's rows of a stream that every process holds whole.

    Random segments are drawn for all rows, so with the same seed all processes cut their rows out
    of the same batch. The cursor and the saved state are those of the whole stream.

    Args:
        stream: with all rows.
        share: from the number of all rows to those of this process.
    """

    def __init__(self, stream: Stream, share: Callable[[int], range]) -> None:
        self.whole, self.burn_in = stream, stream.burn_in
        self._share = share

    def _cut(self, segment: Segment) -> Segment:
        rows = self._share(segment.rows)
        cut: Segment = map_leaves(lambda leaf: leaf[:, rows.start : rows.stop], segment)
        if cut.start is None:
            return cut
        return cut._replace(start=cut.start.of_rows(torch.arange(rows.start, rows.stop)))

    def segment(self, start: int, stop: int) -> Segment:
        """Return steps `start` to `stop` of this process's rows."""
        return self._cut(self.whole.segment(start, stop))

    def random_segment(self, steps: int, generator: torch.Generator | None = None) -> Segment:
        """Cut `steps` steps out of every row of the whole; return this process's rows."""
        return self._cut(self.whole.random_segment(steps, generator))

    def peek(self, steps: int) -> Segment:
        """Return up to `steps` steps of this process's rows from the cursor on."""
        return self._cut(self.whole.peek(steps))

    @property
    def rows(self) -> int:
        """Number of rows of this process."""
        return len(self._share(self.whole.rows))

    # The rest is that of the whole stream.

    @property
    def cursor(self) -> int:
        """The next step to carry a loss."""
        return self.whole.cursor

    @cursor.setter
    def cursor(self, step: int) -> None:
        self.whole.cursor = step

    @property
    def length(self) -> int | None:
        """Steps of each row."""
        return self.whole.length

    def available(self, stop: int) -> int:
        """Make steps up to `stop` available; return how far the data really goes."""
        return self.whole.available(stop)

    def rewind(self) -> None:
        """Go back to the first step."""
        self.whole.rewind()

    def next_epoch(self) -> None:
        """Go back to the first step, in the order of the next epoch."""
        self.whole.next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole stream."""
        return self.whole.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load the state of the whole stream."""
        self.whole.load_state_dict(saved)

    def forget(self, before: int) -> None:
        """Release the steps before this one."""
        self.whole.forget(before)

    def reserve(self, steps: int) -> None:
        """Announce the length of random segments."""
        self.whole.reserve(steps)
