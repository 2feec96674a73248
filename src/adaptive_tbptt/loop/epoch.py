"""The windows of one epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..data.stream import Stream
from .window import Window

if TYPE_CHECKING:
    from .adaptive import AdaptiveTBPTT


class Windows:
    """The windows of one epoch, from the stream's cursor to its end. Iterate over it once."""

    def __init__(self, owner: AdaptiveTBPTT, stream: Stream) -> None:
        self._owner, self._stream = owner, stream

    def __len__(self) -> int:
        """Return how many windows are left if K does not change and none is a long one.

        K may change, so the number is a forecast. If a scheduler should follow the data rather than
        the number of updates, step it by `window.progress`.
        """
        length, k = self._stream.length, self._owner.k
        if length is None or k is None:
            raise TypeError(
                "the number of windows is unknown: the stream has no known length, or K was not "
                "estimated yet"
            )
        return math.ceil((length - self._stream.cursor) / self._owner.losses_per_window(k))

    def __iter__(self) -> Iterator[Window]:
        """Yield the windows; afterwards the stream is rewound."""
        self._owner.prepare(self._stream)
        return self._owner._epoch(self._stream)
