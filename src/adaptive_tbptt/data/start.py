"""The state that a stream starts from: that of a rollout, of a replay buffer, of an earlier run."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from .nest import State, detach, leaves


class Start:
    """A state for every row of a stream, and which of them a segment enters with.

    Not a nest: its leaves are laid out as the model's state, not by time and batch, so functions of
    nests pass it through. Only the model knows the batch dimension of each leaf; `entering` in
    `model/running.py` picks the rows.

    Args:
        state: any nest of tensors, laid out as the model's own state for all rows.
        total: number of rows of the stream.
        rows: indices of the segment's rows in the stream; None is all rows in order.
        here: `(rows,)` boolean, true for rows of the segment that begin at the stream's first step;
            None is all of them.
    """

    def __init__(
        self, state: State, total: int, rows: Tensor | None = None, here: Tensor | None = None
    ) -> None:
        if not leaves(state):
            raise TypeError(
                "state must be a nest of tensors, laid out as the state that the model returns for "
                f"all {total} rows, got {type(state).__name__}"
            )
        self.state, self.total = detach(state), total
        self.rows, self.here = rows, here

    def of_rows(self, rows: Tensor) -> Start:
        """Keep some rows, given by their indices in the segment."""
        index = torch.arange(self.total) if self.rows is None else self.rows
        here = None if self.here is None else self.here[rows]
        return Start(self.state, self.total, index[rows], here)

    def where(self, here: Tensor) -> Start | None:
        """Keep the rows that begin at the stream's first step; None if none does."""
        return Start(self.state, self.total, self.rows, here) if bool(here.any()) else None

    @property
    def digest(self) -> int:
        """A checksum of the state."""
        found = 0
        for leaf in leaves(self.state):
            flat = leaf.cpu().contiguous().flatten()
            found = zlib.crc32(flat.view(torch.uint8).numpy().data, found)
        return found
