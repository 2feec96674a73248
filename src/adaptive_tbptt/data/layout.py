"""Where each sequence goes: into which row, at which step. Numbers only, no data."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


def pack_rows(lengths: Sequence[int], rows: int, order: Sequence[int]) -> list[list[int]]:
    """Assign sequences to rows: the longest first, each to the row that is shortest so far.

    The longest row has at most 4/3 - 1/(3 rows) times the least possible length (Graham, 1969). No
    row is padded by more than the shortest sequence of the longest row. How long the rows are
    depends on the lengths of the sequences, not on their order: every epoch of a shuffled stream
    has the same number of steps.

    Args:
        lengths: of each sequence.
        rows: number of rows, at most the number of sequences.
        order: the sequences within a row follow it; it also decides between equal lengths.

    >>> pack_rows([2, 5, 3, 3, 1], rows=2, order=range(5))
    [[0, 1], [2, 3, 4]]
    """
    packed: list[list[int]] = [[] for _ in range(rows)]
    shortest = [(0, row) for row in range(rows)]  # a heap of (steps, row)
    place = {sequence: position for position, sequence in enumerate(order)}
    for sequence in sorted(order, key=lambda i: -lengths[i]):  # stable: equal lengths keep order
        steps, row = shortest[0]
        packed[row].append(sequence)
        heapq.heapreplace(shortest, (steps + lengths[sequence], row))
    return [sorted(row, key=place.__getitem__) for row in packed]


class Layout(NamedTuple):
    """Sequences laid out in rows, padded at the rows' ends.

    Attributes:
        step: `(time, batch)`, which of all steps of all sequences, joined end to end, is here. The
            padding of a row repeats its last step, a value that the model is known to accept.
        sequence: `(time, batch)`, which sequence it belongs to.
        begins: `(time, batch)` boolean, true at the first step of a sequence.
        present: `(time, batch)` boolean, false at padding; None without padding.
    """

    step: Tensor
    sequence: Tensor
    begins: Tensor
    present: Tensor | None

    @staticmethod
    def of(lengths: Sequence[int], rows: int, order: Sequence[int]) -> Layout:
        """Lay sequences out; the arguments are those of `pack_rows`."""
        packed = pack_rows(lengths, rows, order)
        sizes, starts = np.array(lengths), np.cumsum([0, *lengths])[:-1]
        totals = [int(sizes[row].sum()) for row in packed]
        longest = max(totals)
        step = np.empty((longest, rows), np.int64)
        sequence = np.empty((longest, rows), np.int64)
        begins = np.zeros((longest, rows), bool)
        for r, (row, total) in enumerate(zip(packed, totals, strict=True)):
            first = np.cumsum([0, *sizes[row]])[:-1]  # where in the row each sequence begins
            sequence[:total, r] = np.repeat(row, sizes[row])
            step[:total, r] = np.arange(total) + np.repeat(starts[row] - first, sizes[row])
            begins[first, r] = True
            step[total:, r], sequence[total:, r] = step[total - 1, r], sequence[total - 1, r]
        present = np.arange(longest)[:, None] < np.array(totals)
        return Layout(
            torch.from_numpy(step),
            torch.from_numpy(sequence),
            torch.from_numpy(begins),
            None if present.all() else torch.from_numpy(present),
        )
