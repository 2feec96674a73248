"""Consecutive steps of every row, time first: what models are run on and losses computed from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .nest import (
    Nest,
    leaves,
    map_leaves,
    named_leaves,
    rows_of,
    slice_steps,
    steps_of,
    swap_time_and_batch,
)


class Segment(NamedTuple):
    """Consecutive steps of every row, time first.

    Attributes:
        inputs: a tensor, or a nest of tensors, `(time, batch, ...)`.
        targets: of the same time and batch.
        resets: `(time, batch)` boolean, true where a row starts a new sequence; None for nowhere.
    """

    inputs: Nest
    targets: Nest
    resets: Tensor | None = None

    @property
    def steps(self) -> int:
        """Number of steps."""
        return steps_of(self.inputs)

    @property
    def rows(self) -> int:
        """Number of rows (the batch size)."""
        return rows_of(self.inputs)

    def between(self, start: int, stop: int) -> Segment:
        """Cut out steps `start` to `stop`."""
        cut: Segment = slice_steps(self, start, stop)
        return cut

    def shifted(self, steps: int, generator: torch.Generator | None) -> Segment:
        """Cut `steps` consecutive steps out of every row, each row at its own random offset."""
        if not 1 <= steps <= self.steps:
            raise ValueError(
                f"a segment of {steps} steps does not fit into a stream of {self.steps}; "
                "measure fewer lags or give more data"
            )
        offsets = torch.randint(self.steps - steps + 1, (self.rows,), generator=generator)
        index = offsets + torch.arange(steps)[:, None]
        columns = torch.arange(self.rows)

        def cut(leaf: Tensor) -> Tensor:
            return leaf[index.to(leaf.device), columns.to(leaf.device)]

        shifted: Segment = map_leaves(cut, self)
        return shifted


def time_first(
    inputs: Nest, targets: Nest, resets: Tensor | None = None, *, batch_first: bool = False
) -> Segment:
    """Turn data of either layout into a segment; refuse parts that do not belong together."""
    check_steps(inputs, targets, resets)
    segment = Segment(inputs, targets, resets)
    if batch_first:
        segment = Segment(*(swap_time_and_batch(part) for part in segment))
    if segment.steps == 0 or segment.rows == 0:
        raise ValueError("a stream needs at least one step and one row")
    if segment.resets is not None and segment.resets.dtype != torch.bool:
        raise TypeError(f"resets must be boolean, got {segment.resets.dtype}")
    return segment


def check_steps(inputs: Nest, targets: Nest, resets: Tensor | None) -> None:
    """Refuse inputs, targets and resets that do not have the same steps and rows."""
    parts = {"inputs": inputs, "targets": targets, "resets": resets}
    for name, nest in parts.items():
        if nest is not None and not leaves(nest):
            raise TypeError(
                f"{name} must be a tensor or a nest of tensors, got {type(nest).__name__}"
            )
        for leaf in leaves(nest):
            if leaf.dim() < 2:
                raise ValueError(
                    f"{name} must be (time, batch, ...), got shape {tuple(leaf.shape)}"
                )
            if leaf.shape[:2] != leaves(inputs)[0].shape[:2]:
                raise ValueError(
                    f"{name} have (time, batch) = {tuple(leaf.shape[:2])}, the inputs "
                    f"{tuple(leaves(inputs)[0].shape[:2])}: every step of every row needs both"
                )


def check_finite(inputs: Nest, what: str = "the inputs") -> None:
    """Refuse NaN and infinity, naming the first step that has one."""
    for name, leaf in named_leaves(inputs):
        if leaf.is_floating_point() and not torch.isfinite(leaf).all():
            bad = ~torch.isfinite(leaf).flatten(1).all(dim=1)
            step = int(bad.nonzero()[0])
            where = "" if name == "state" else f" (leaf '{name}')"
            raise ValueError(f"{what} are NaN or infinite at step {step}{where}")
