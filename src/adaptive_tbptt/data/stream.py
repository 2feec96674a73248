"""Long sequences, time first: segments of them, and streams that a training loop reads."""

from __future__ import annotations

import warnings
import zlib
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .nest import Nest, State, leaves, map_leaves, named_leaves, slice_steps, swap_time_and_batch
from .start import Start


class Segment(NamedTuple):
    """Consecutive steps of every row, time first.

    Attributes:
        inputs: a tensor, or a nest of tensors, `(time, batch, ...)`.
        targets: of the same time and batch.
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
    def digest(self) -> int:
        """A checksum of up to 64 steps, to tell these data from others of the same size."""
        steps = torch.linspace(0, self.steps - 1, min(self.steps, 64), dtype=torch.float64).long()
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

    def shifted(self, steps: int, generator: torch.Generator | None) -> Segment:
        """Cut `steps` consecutive steps out of every row, each row at its own random offset."""
        length, rows = self._first.shape[:2]
        if not 1 <= steps <= length:
            raise ValueError(
                f"a segment of {steps} steps does not fit into a stream of {length}; "
                "measure fewer lags or give more data"
            )
        offsets = torch.randint(length - steps + 1, (rows,), generator=generator)
        index, columns = offsets + torch.arange(steps)[:, None], torch.arange(rows)
        shifted: Segment = map_leaves(
            lambda leaf: leaf[index.to(leaf.device), columns.to(leaf.device)], self
        )
        if self.start is not None:
            shifted = shifted._replace(start=self.start.where(offsets == 0))
        return shifted


def time_first(
    inputs: Nest, targets: Nest, resets: Tensor | None = None, *, batch_first: bool = False
) -> Segment:
    """Turn data of either layout into a segment; refuse parts whose shapes do not match."""
    for name, nest in {"inputs": inputs, "targets": targets, "resets": resets}.items():
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
    segment = Segment(inputs, targets, resets)
    if batch_first:
        segment = swap_time_and_batch(segment)
    if segment.steps == 0 or segment.rows == 0:
        raise ValueError("a stream needs at least one step and one row")
    if segment.resets is not None and segment.resets.dtype != torch.bool:
        raise TypeError(f"resets must be boolean, got {segment.resets.dtype}")
    return segment


def check_finite(inputs: Nest, what: str = "the inputs") -> None:
    """Refuse NaN and infinity, naming the first step that has one."""
    for name, leaf in named_leaves(inputs):
        if leaf.is_floating_point() and not torch.isfinite(leaf).all():
            bad = ~torch.isfinite(leaf).flatten(1).all(dim=1)
            where = "" if name == "state" else f" (leaf '{name}')"
            raise ValueError(f"{what} are NaN or infinite at step {int(bad.nonzero()[0])}{where}")


class Stream(ABC):
    """The interface through which a training loop reads its data.

    Attributes:
        cursor: the next step to carry a loss.
        burn_in: leading steps that only warm the state up: they carry no loss and no gradient.
    """

    cursor: int = 0
    burn_in: int = 0

    @property
    @abstractmethod
    def rows(self) -> int:
        """Number of rows (the batch size)."""

    @property
    @abstractmethod
    def length(self) -> int | None:
        """Steps of each row; None while unknown."""

    @abstractmethod
    def available(self, stop: int) -> int:
        """Make steps up to `stop` available; return how far the data goes, at most `stop`."""

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
        """Return up to `steps` steps from the cursor on, without reading far ahead."""

    @abstractmethod
    def rewind(self) -> None:
        """Go back to the first step that carries a loss."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to resume at the cursor."""

    @abstractmethod
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go back to a saved cursor; refuse that of other data if the difference shows."""

    def forget(self, before: int) -> None:
        """Announce that `segment` will not be called for steps before this one again."""
        del before

    def reserve(self, steps: int) -> None:
        """Announce the length of the random segments to come."""
        del steps

    def read(self, steps: int) -> Segment:
        """Return the next `steps` steps, fewer at the end, and move the cursor past them."""
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        start, self.cursor = self.cursor, self.available(self.cursor + steps)
        return self.segment(start, self.cursor)


def require_stream(data: Any) -> None:
    """Refuse anything but a stream, and say how to make one."""
    if not isinstance(data, Stream):
        raise TypeError(
            f"expected a stream, got {type(data).__name__}; wrap tensors in "
            "SequenceStream(inputs, targets), chunks in ChunkStream(loader)"
        )


def warn_of_other_data(saved: dict[str, Any], digest: int) -> None:
    """Warn if a saved stream had other data; streams that old releases saved do not say."""
    if saved.get("digest", digest) != digest:
        warnings.warn(
            f"the data differ from those that the run was saved with, though their size is the "
            f"same. The run goes on from step {saved['cursor']} of the new data with the weights, "
            "the carried state and the optimiser of the old",
            UserWarning,
            stacklevel=3,
        )


class SequenceStream(Stream):
    """`(time, batch, ...)` tensors read in order; rows are independent of each other.

    Args:
        inputs: a tensor, or a nest of tensors, `(time, batch, ...)`.
        targets: of the same time and batch.
        resets: `(time, batch)` boolean, true where a row starts a new sequence: its state returns
            to the initial one before that step. None means one sequence per row.
        batch_first: whether the tensors given are `(batch, time, ...)`.
        state: the state that enters the first step, laid out as the model's own state for all
            rows; it is detached. None is the model's initial state.
        burn_in: leading steps that only warm the state up: they carry no loss and no gradient.

    Choosing state and burn_in: for rollouts of an agent pass the state that the rollout began
    with. For sequences from a replay buffer pass the stored state, some burn-in, or both.

    Attributes:
        rows: number of rows.
        length: number of steps of each row.

    >>> stream = SequenceStream(torch.arange(12.0).view(6, 2), torch.zeros(6, 2))
    >>> stream.read(4).inputs.shape, stream.cursor, len(stream)
    (torch.Size([4, 2]), 4, 6)
    """

    rows: int = 0  # plain attributes in place of the abstract properties: every window reads them
    length: int = 0

    def __init__(
        self,
        inputs: Nest,
        targets: Nest,
        resets: Tensor | None = None,
        *,
        batch_first: bool = False,
        state: State = None,
        burn_in: int = 0,
    ) -> None:
        self._all = time_first(inputs, targets, resets, batch_first=batch_first)
        self.length, self.rows = self._all.steps, self._all.rows
        if state is not None:
            self._all = self._all._replace(start=Start(state, self.rows))
        if not 0 <= burn_in < self.length:
            raise ValueError(
                f"burn_in must be in [0, {self.length - 1}] to leave a step with a loss, got "
                f"{burn_in}"
            )
        self.burn_in = self.cursor = burn_in
        self._digest: int | None = None

    def __len__(self) -> int:
        """Return the number of steps of each row."""
        return self.length

    def available(self, stop: int) -> int:
        """Return how far the data goes, at most `stop`."""
        return min(stop, self.length)

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
        """Go back to the first step that carries a loss."""
        self.cursor = self.burn_in

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, with the size and a checksum of the data it belongs to."""
        if self._digest is None:
            self._digest = self._all.digest
        size = {"length": self.length, "rows": self.rows}
        return {"cursor": self.cursor, **size, "digest": self._digest}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go back to a saved cursor; refuse data of another size, warn of other data."""
        if (saved["length"], saved["rows"]) != (self.length, self.rows):
            raise ValueError(
                f"the saved stream has {saved['length']} steps of {saved['rows']} rows, this one "
                f"{self.length} of {self.rows}"
            )
        self._digest = self._all.digest
        warn_of_other_data(saved, self._digest)
        self.cursor = int(saved["cursor"])
