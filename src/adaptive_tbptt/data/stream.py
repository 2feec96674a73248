"""A long sequence read in order, window by window, or sampled at random for the probe."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from .nest import Nest
from .segment import (
    Segment,
    time_first,
)


class Stream(ABC):
    """What the training loop asks of its data.

    Attributes:
        cursor: the next step to carry a loss.
    """

    cursor: int = 0

    @property
    @abstractmethod
    def rows(self) -> int:
        """Number of rows (the batch size)."""

    @property
    @abstractmethod
    def length(self) -> int | None:
        """Steps of each row; None while it is not known."""

    @abstractmethod
    def available(self, stop: int) -> int:
        """Make steps up to `stop` available; return how far the data really goes."""

    @abstractmethod
    def segment(self, start: int, stop: int) -> Segment:
        """Return steps `start` to `stop`; they must be available and not forgotten."""

    @abstractmethod
    def random_segment(self, steps: int, generator: torch.Generator | None = None) -> Segment:
        """Cut `steps` consecutive steps out of every row, each row at its own random offset.

        Args:
            steps: length of the segment.
            generator: source of the offsets; None uses torch's global one.
        """

    @abstractmethod
    def peek(self, steps: int) -> Segment:
        """Return up to `steps` steps from the cursor on, as far as they are at hand."""

    @abstractmethod
    def rewind(self) -> None:
        """Go back to the first step."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on from the present cursor."""

    @abstractmethod
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go back to a saved cursor; refuse one of other data where that can be told."""

    def forget(self, before: int) -> None:
        """Say that steps before this one will not be asked for by number again."""
        del before

    def reserve(self, steps: int) -> None:
        """Say that random segments will be of so many steps."""
        del steps

    def read(self, steps: int) -> Segment:
        """Return the next `steps` steps, fewer at the end, and move the cursor past them."""
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        start, self.cursor = self.cursor, self.available(self.cursor + steps)
        return self.segment(start, self.cursor)


def require_stream(data: Any) -> None:
    """Refuse what is no stream, and say how to make one."""
    if not isinstance(data, Stream):
        raise TypeError(
            f"expected a stream, got {type(data).__name__}; wrap tensors in "
            "SequenceStream(inputs, targets), chunks in ChunkStream(loader)"
        )


class SequenceStream(Stream):
    """`(time, batch, ...)` tensors read in order; rows are independent of each other.

    Args:
        inputs: a tensor, or a nest of tensors, `(time, batch, ...)`.
        targets: of the same time and batch.
        resets: `(time, batch)` boolean, true where a row starts a new sequence: its state returns
            to the initial one before that step. None means one sequence per row.
        batch_first: whether the tensors given are `(batch, time, ...)`.

    >>> stream = SequenceStream(torch.arange(12.0).view(6, 2), torch.zeros(6, 2))
    >>> stream.read(4).inputs.shape, stream.cursor, len(stream)
    (torch.Size([4, 2]), 4, 6)
    """

    def __init__(
        self,
        inputs: Nest,
        targets: Nest,
        resets: Tensor | None = None,
        *,
        batch_first: bool = False,
    ) -> None:
        self._all = time_first(inputs, targets, resets, batch_first=batch_first)

    def __len__(self) -> int:
        """Return the number of steps of each row."""
        return self._all.steps

    @property
    def rows(self) -> int:
        """Number of rows (the batch size)."""
        return self._all.rows

    @property
    def length(self) -> int:
        """Steps of each row."""
        return len(self)

    def available(self, stop: int) -> int:
        """Return how far the data goes, at most `stop`."""
        return min(stop, len(self))

    def segment(self, start: int, stop: int) -> Segment:
        """Return steps `start` to `stop`, without copying."""
        return self._all.between(start, stop)

    def random_segment(self, steps: int, generator: torch.Generator | None = None) -> Segment:
        """Cut `steps` consecutive steps out of every row, each row at its own random offset."""
        return self._all.shifted(steps, generator)

    def peek(self, steps: int) -> Segment:
        """Return up to `steps` steps from the cursor on."""
        return self._all.between(self.cursor, self.available(self.cursor + steps))

    def rewind(self) -> None:
        """Go back to the first step."""
        self.cursor = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, and the size of the data it belongs to."""
        return {"cursor": self.cursor, "length": len(self), "rows": self.rows}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go back to a saved cursor; refuse one of data of another size."""
        if (saved["length"], saved["rows"]) != (len(self), self.rows):
            raise ValueError(
                f"the saved stream has {saved['length']} steps of {saved['rows']} rows, this one "
                f"{len(self)} of {self.rows}"
            )
        self.cursor = int(saved["cursor"])
