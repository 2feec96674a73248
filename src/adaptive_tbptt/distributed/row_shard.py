"""Some of the rows of a stream, for one of several processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..data.nest import map_leaves
from ..data.stream import Segment, Stream


class RowShard(Stream):
    """A share of the rows of a stream that every process holds whole.

    Random segments are drawn for all rows, so with the same seed every process cuts the rows of
    one and the same batch. The cursor and what is saved are those of the whole stream.

    Args:
        stream: with all rows.
        share: from the number of all rows to those of this process.
    """

    def __init__(self, stream: Stream, share: Callable[[int], range]) -> None:
        self.whole = stream
        self._share = share

    @property
    def cursor(self) -> int:
        """The next step to carry a loss."""
        return self.whole.cursor

    @cursor.setter
    def cursor(self, step: int) -> None:
        self.whole.cursor = step

    @property
    def rows(self) -> int:
        """Number of rows of this process."""
        return len(self._share(self.whole.rows))

    @property
    def length(self) -> int | None:
        """Steps of each row."""
        return self.whole.length

    def available(self, stop: int) -> int:
        """Make steps up to `stop` available; return how far the data really goes."""
        return self.whole.available(stop)

    def segment(self, start: int, stop: int) -> Segment:
        """Return steps `start` to `stop` of this process's rows."""
        return self._cut(self.whole.segment(start, stop))

    def random_segment(self, steps: int, generator: torch.Generator | None = None) -> Segment:
        """Cut `steps` steps out of every row of the whole; return this process's."""
        return self._cut(self.whole.random_segment(steps, generator))

    def peek(self, steps: int) -> Segment:
        """Return up to `steps` steps of this process's rows from the cursor on."""
        return self._cut(self.whole.peek(steps))

    def rewind(self) -> None:
        """Go back to the first step."""
        self.whole.rewind()

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on from the present cursor."""
        return self.whole.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go back to a saved cursor."""
        self.whole.load_state_dict(saved)

    def forget(self, before: int) -> None:
        """Say that steps before this one will not be asked for by number again."""
        self.whole.forget(before)

    def reserve(self, steps: int) -> None:
        """Say that random segments will be of so many steps."""
        self.whole.reserve(steps)

    def _cut(self, segment: Segment) -> Segment:
        rows = self._share(segment.rows)

        def cut(leaf: Tensor) -> Tensor:
            return leaf[:, rows.start : rows.stop]

        return Segment(*(map_leaves(cut, part) for part in segment))
