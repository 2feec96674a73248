"""Sequences of any lengths, held once, and read as rows of a stream."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .layout import Layout
from .nest import Nest, map_leaves
from .padding import Padded
from .segment import Segment, random_steps, spread_steps


class Sequences(NamedTuple):
    """Sequences joined end to end.

    Attributes:
        inputs: a nest of `(all steps, ...)`.
        targets: of the same steps.
        static: a nest of `(sequences, ...)`, inputs without time; None for none.
        lengths: steps of each sequence.
    """

    inputs: Nest
    targets: Nest
    static: Nest
    lengths: list[int]


PADDED = 1.1  # arbitrary: more padding than that is not worth its memory


class LaidOut:
    """Sequences in rows, in the order of one epoch.

    Steps are gathered when they are read. If every epoch has the same order, no static inputs and
    hardly any padding, all are gathered once, so that a window is a view.

    Args:
        data: the sequences.
        rows: number of rows.
        seed: with the epoch, it decides on the order; None keeps the order of the sequences.
        epoch: counted from 0.
        static_once: whether static inputs are zero after the first step of a sequence.
    """

    def __init__(
        self, data: Sequences, rows: int, *, seed: int | None, epoch: int, static_once: bool
    ) -> None:
        count = len(data.lengths)
        if not 1 <= rows <= count:
            raise ValueError(
                f"rows must be in [1, {count}], as there are {count} sequences, got {rows}: every "
                "row needs a sequence"
            )
        order = list(range(count))
        if seed is not None:
            order = np.random.default_rng((seed, epoch)).permutation(count).tolist()
        self._data: Sequences | None = data
        self._static_once = static_once
        self._layout = Layout.of(data.lengths, rows, order)
        self.rows, self.seed, self.epoch = rows, seed, epoch
        self.steps = len(self._layout.step)
        # A row's first sequence needs no reset: a stream begins from the initial state.
        self._resets: Tensor | None = self._layout.begins.clone()
        self._resets[0] = False
        if not self._resets.any():
            self._resets = None
        present = self._layout.present
        self._full = self.steps if present is None else int(present.all(dim=1).sum())
        self._once: tuple[Nest, Nest] | None = None
        dense = PADDED * sum(data.lengths) >= self.steps * rows
        if seed is None and data.static is None and dense:
            self._once, self._data = self._gathered(slice(None)), None

    def of_epoch(self, epoch: int) -> LaidOut:
        """Return the same sequences in the order of another epoch."""
        if self.seed is None or self._data is None or epoch == self.epoch:
            return self
        once = self._static_once
        return LaidOut(self._data, self.rows, seed=self.seed, epoch=epoch, static_once=once)

    @property
    def digest(self) -> int:
        """A checksum of up to 64 steps, as that of a segment."""
        return self._take(spread_steps(self.steps)).digest

    def between(self, start: int, stop: int) -> Segment:
        """Return steps `start` to `stop`."""
        return self._take(slice(start, stop))

    def shifted(self, steps: int, generator: torch.Generator | None) -> Segment:
        """Cut `steps` consecutive steps out of every row, each row at its own random offset."""
        return self._take(random_steps(self.steps, self.rows, steps, generator))

    def _take(self, which: Any) -> Segment:
        """Return the steps at an index into `(time, batch)`."""
        if self._once is None:
            inputs, targets = self._gathered(which)
        else:
            inputs, targets = (_gather(nest, which) for nest in self._once)
        if not (isinstance(which, slice) and which.stop <= self._full):
            present = self._layout.present
            if present is not None and not bool(present[which].all()):
                targets = Padded(targets, present[which])
        return Segment(inputs, targets, None if self._resets is None else self._resets[which])

    def _gathered(self, which: Any) -> tuple[Nest, Nest]:
        """Gather the inputs, static ones included, and the targets of the steps at an index."""
        assert self._data is not None
        layout, step = self._layout, self._layout.step[which]
        inputs, targets = _gather(self._data.inputs, step), _gather(self._data.targets, step)
        if self._data.static is not None:
            static = _gather(self._data.static, layout.sequence[which])
            if self._static_once:
                begins = layout.begins[which]
                static = map_leaves(lambda leaf: _zero_unless(begins, leaf), static)
            inputs = with_static(inputs, static)
        return inputs, targets


def with_static(inputs: Nest, static: Nest) -> Nest:
    """Add static inputs: as the entry 'static' of a dict, or as further features of a tensor."""
    if isinstance(inputs, dict):
        return {**inputs, "static": static}
    return torch.cat([inputs, static], dim=-1)


def _gather(nest: Nest, index: Any) -> Nest:
    """Return the elements at a slice, or at the indices in a tensor or a tuple of tensors."""
    return map_leaves(lambda leaf: leaf[_on(leaf.device, index)], nest)


def _on(device: torch.device, index: Any) -> Any:
    return index if isinstance(index, slice) else map_leaves(lambda x: x.to(device), index)


def _zero_unless(mask: Tensor, leaf: Tensor) -> Tensor:
    mask = mask.to(leaf.device).view(*mask.shape, *[1] * (leaf.dim() - 2))
    return torch.where(mask, leaf, torch.zeros_like(leaf))


def join(
    inputs: list[Nest], targets: list[Nest], static: list[Nest] | None, lengths: list[int]
) -> Sequences:
    """Join sequences of equal structure end to end."""

    def joined(parts: list[Nest]) -> Nest:
        return map_leaves(lambda *leaf: torch.cat(leaf), *parts)

    stacked = None
    if static is not None:
        stacked = map_leaves(lambda *leaf: torch.stack(leaf), *static)
    return Sequences(joined(inputs), joined(targets), stacked, lengths)
