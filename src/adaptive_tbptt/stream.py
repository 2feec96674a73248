"""A long sequence read in order, window by window, or sampled at random for the probe."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .model import Nest, check_steps, rows_of, slice_steps, steps_of, swap_time_and_batch
from .state import map_leaves


class Segment(NamedTuple):
    """Consecutive steps of every row, time first; `resets` is true where a sequence starts."""

    inputs: Nest
    targets: Nest
    resets: Tensor | None = None


class SequenceStream:
    """`(time, batch, ...)` tensors read in order; rows are independent of each other.

    Args:
        inputs: a tensor, or a nest of tensors, `(time, batch, ...)`.
        targets: of the same time and batch.
        resets: `(time, batch)` boolean, true where a row starts a new sequence: its state returns
            to the initial one before that step. None means one sequence per row.
        batch_first: whether the tensors given are `(batch, time, ...)`.

    >>> stream = SequenceStream(torch.arange(12.0).view(6, 2), torch.zeros(6, 2))
    >>> stream.read(4).inputs.shape, stream.cursor, stream.remaining
    (torch.Size([4, 2]), 4, 2)
    """

    def __init__(
        self,
        inputs: Nest,
        targets: Nest,
        resets: Tensor | None = None,
        *,
        batch_first: bool = False,
    ) -> None:
        if batch_first:
            inputs, targets = swap_time_and_batch(inputs), swap_time_and_batch(targets)
            resets = None if resets is None else resets.transpose(0, 1)
        check_steps(inputs, targets, resets)
        if steps_of(inputs) == 0 or rows_of(inputs) == 0:
            raise ValueError("a stream needs at least one step and one row")
        if resets is not None and resets.dtype != torch.bool:
            raise TypeError(f"resets must be boolean, got {resets.dtype}")
        self._all = Segment(inputs, targets, resets)
        self.cursor = 0

    def __len__(self) -> int:
        """Return the number of steps of each row."""
        return steps_of(self._all.inputs)

    @property
    def rows(self) -> int:
        """Number of rows (the batch size)."""
        return rows_of(self._all.inputs)

    @property
    def remaining(self) -> int:
        """Steps left to read."""
        return len(self) - self.cursor

    def read(self, steps: int) -> Segment:
        """Return the next `steps` steps, fewer at the end, and move the cursor past them."""
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        start = self.cursor
        self.cursor = min(start + steps, len(self))
        return Segment(*(slice_steps(part, start, self.cursor) for part in self._all))

    def rewind(self) -> None:
        """Go back to the first step."""
        self.cursor = 0

    def random_segment(self, steps: int, generator: torch.Generator | None = None) -> Segment:
        """Cut `steps` consecutive steps out of every row, each row at its own random offset.

        Args:
            steps: length of the segment.
            generator: source of the offsets; None uses torch's global one.
        """
        if not 1 <= steps <= len(self):
            raise ValueError(
                f"a segment of {steps} steps does not fit into a stream of {len(self)}; "
                "measure a shorter window or give more data"
            )
        offsets = torch.randint(len(self) - steps + 1, (self.rows,), generator=generator)
        index = offsets + torch.arange(steps)[:, None]
        columns = torch.arange(self.rows)

        def cut(leaf: Tensor) -> Tensor:
            return leaf[index.to(leaf.device), columns.to(leaf.device)]

        return Segment(*(map_leaves(cut, part) for part in self._all))

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, and the size of the data it belongs to."""
        return {"cursor": self.cursor, "length": len(self), "rows": self.rows}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Return to a saved cursor; refuse one of a stream of another size."""
        if (saved["length"], saved["rows"]) != (len(self), self.rows):
            raise ValueError(
                f"the saved stream has {saved['length']} steps of {saved['rows']} rows, this one "
                f"{len(self)} of {self.rows}"
            )
        self.cursor = int(saved["cursor"])
