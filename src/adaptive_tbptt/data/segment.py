"""Consecutive steps of every row, time first; data of either layout as such."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from .nest import (
    Nest,
    leaf_label,
    leaves,
    map_leaves,
    named_leaves,
    slice_steps,
    swap_time_and_batch,
)
from .padding import Padded
from .start import Start


class Segment(NamedTuple):
    """Consecutive steps of every row, time first.

    Attributes:
        inputs: a tensor, or a nest of tensors, `(time, batch, ...)`.
        targets: of the same time and batch; `Padded` where some steps are padding.
        resets: `(time, batch)` boolean, true where a row starts a new sequence; None for no reset.
        start: the state that enters, if the segment begins where its stream does and the stream
            was given one.
    """

    inputs: Nest
    targets: Nest
    resets: Tensor | None = None
    start: Start | None = None

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self._first.shape[0]

    @property
    def rows(self) -> int:
        """Number of rows (the batch size)."""
        return self._first.shape[1]

    @property
    def _first(self) -> Tensor:
        return self.inputs if isinstance(self.inputs, Tensor) else leaves(self.inputs)[0]

    @property
    def present(self) -> Tensor | None:
        """`(time, batch)` boolean, false at padding; None without padding."""
        return self.targets.present if isinstance(self.targets, Padded) else None

    @property
    def digest(self) -> int:
        """A checksum of up to 64 steps, to tell these data from others of the same size."""
        steps = spread_steps(self.steps)
        found = 0 if self.start is None else self.start.digest
        for leaf in leaves(self):
            part = leaf.detach()[steps.to(leaf.device)].cpu().contiguous()
            found = zlib.crc32(part.flatten().view(torch.uint8).numpy().data, found)
        return found

    def between(self, start: int, stop: int) -> Segment:
        """Cut out steps `start` to `stop`."""
        inputs = slice_steps(self.inputs, start, stop)
        targets = slice_steps(self.targets, start, stop)
        resets = None if self.resets is None else self.resets[start:stop]
        return Segment(inputs, targets, resets, None if start else self.start)

    def of_rows(self, rows: Tensor) -> Segment:
        """Keep some rows, given by their indices."""
        kept: Segment = map_leaves(lambda leaf: leaf[:, rows.to(leaf.device)], self)
        return kept if self.start is None else kept._replace(start=self.start.of_rows(rows))

    def shifted(self, steps: int, generator: torch.Generator | None) -> Segment:
        """Cut `steps` consecutive steps out of every row, each row at its own random offset."""
        index, columns = random_steps(self.steps, self.rows, steps, generator)
        shifted: Segment = map_leaves(
            lambda leaf: leaf[index.to(leaf.device), columns.to(leaf.device)], self
        )
        if self.start is not None:
            shifted = shifted._replace(start=self.start.where(index[0] == 0))
        return shifted


def random_steps(
    length: int, rows: int, steps: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Return indices into `(time, batch)`: `steps` steps of every row, each at a random offset."""
    if not 1 <= steps <= length:
        raise ValueError(
            f"a segment of {steps} steps does not fit into a stream of {length}; "
            "measure fewer lags or give more data"
        )
    offsets = torch.randint(length - steps + 1, (rows,), generator=generator)
    return offsets + torch.arange(steps)[:, None], torch.arange(rows)


def spread_steps(length: int) -> Tensor:
    """Return up to 64 steps, spread evenly."""
    return torch.linspace(0, length - 1, min(length, 64), dtype=torch.float64).long()


def time_first(
    inputs: Nest, targets: Nest, resets: Tensor | None = None, *, batch_first: bool = False
) -> Segment:
    """Turn data of either layout into a segment; refuse parts whose shapes do not match."""
    for name, nest in {"inputs": inputs, "targets": targets, "resets": resets}.items():
        if nest is not None and not leaves(nest):
            raise TypeError(
                f"{name} must be a tensor or a nest of tensors, got {type(nest).__name__}"
            )
        for part, leaf in named_leaves(nest):
            label = f"{name}{leaf_label(part)}"
            if leaf.dim() < 2:
                raise ValueError(
                    f"{label} must be (time, batch, ...), got shape {tuple(leaf.shape)}"
                )
            if leaf.shape[:2] != leaves(inputs)[0].shape[:2]:
                raise ValueError(
                    f"{label} have (time, batch) = {tuple(leaf.shape[:2])}, the inputs "
                    f"{tuple(leaves(inputs)[0].shape[:2])}: every step of every row needs both"
                )
    segment = Segment(inputs, targets, resets)
    if batch_first:
        segment = swap_time_and_batch(segment)
    if segment.steps == 0 or segment.rows == 0:
        raise ValueError("a stream needs at least one step and one row")
    for name, mask in {"resets": segment.resets, "present": segment.present}.items():
        if mask is not None and mask.dtype != torch.bool:
            raise TypeError(f"{name} must be boolean, got {mask.dtype}: pass {name}.bool()")
    if segment.present is not None:
        _check_padding(segment.inputs, ~segment.present)
    return segment


def _check_padding(inputs: Nest, padding: Tensor) -> None:
    """Refuse NaN: the model reads padded inputs, and a NaN in its backward pass times 0 is NaN."""
    for name, leaf in named_leaves(inputs):
        if leaf.is_floating_point() and not torch.isfinite(leaf[padding.to(leaf.device)]).all():
            raise ValueError(
                f"the inputs{leaf_label(name)} are NaN or infinite at padded steps: the model "
                "reads these too, and their gradient would be NaN. Fill them with 0"
            )


def check_finite(inputs: Nest, what: str = "the inputs") -> None:
    """Refuse NaN and infinity, naming the first step that has one."""
    for name, leaf in named_leaves(inputs):
        if leaf.is_floating_point() and not torch.isfinite(leaf).all():
            bad = ~torch.isfinite(leaf).flatten(1).all(dim=1)
            step = int(bad.nonzero()[0])
            raise ValueError(f"{what} are NaN or infinite at step {step}{leaf_label(name)}")
