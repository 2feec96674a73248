"""Streams: long sequences, time first, that a training loop reads."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .nest import Nest, State
from .reading import read_sequences
from .segment import Segment, time_first
from .sequences import LaidOut
from .series import cut_series
from .start import Start


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

    def next_epoch(self) -> None:
        """Go back to the first step; a stream that shuffles takes a new order."""
        self.rewind()

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

    `from_sequences` takes sequences of any lengths, `from_series` cuts one long series into rows.

    Args:
        inputs: a tensor, or a nest of tensors, `(time, batch, ...)`.
        targets: of the same time and batch; `Padded` where some steps are padding.
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
    _laid: LaidOut | None = None  # set by `from_sequences`

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
        data = time_first(inputs, targets, resets, batch_first=batch_first)
        if state is not None:
            data = data._replace(start=Start(state, data.rows))
        if not 0 <= burn_in < data.steps:
            raise ValueError(
                f"burn_in must be in [0, {data.steps - 1}] to leave a step with a loss, got "
                f"{burn_in}"
            )
        self.burn_in = self.cursor = burn_in
        self._hold(data)

    @classmethod
    def from_sequences(
        cls,
        sequences: Iterable[Any],
        rows: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        static_once: bool = False,
    ) -> SequenceStream:
        """Lay out sequences of any lengths in rows, with a reset before each.

        Each sequence, from the longest to the shortest, goes to the row that is shortest so far.
        Padding fills the ends of the rows, and never reaches `loss_fn`: see `Padded`.

        Args:
            sequences: a list of `(inputs, targets)` or `(inputs, targets, static)`, one per
                sequence, or a map-style `Dataset` of such. Inputs and targets are nests of
                `(time, ...)` tensors or NumPy arrays; static is a nest of leaves without time. Or a
                pair of `PackedSequence`.
            rows: number of rows (the batch size), at most the number of sequences.
            shuffle: whether every epoch has an order of its own. It depends on the seed and the
                number of the epoch alone, so a resumed run goes on exactly.
            seed: of the order.
            static_once: static inputs are zero after a sequence's first step. Otherwise the model
                sees them at every step. They are further features of inputs `(time, features)`, or
                the entry `"static"` of inputs that are a dict.

        Choosing `rows`: few rows make long ones with little padding, many run faster. Have several
        times as many sequences as rows.

        >>> lengths = 5, 3, 2, 2
        >>> sequences = [(torch.ones(n, 3), torch.zeros(n)) for n in lengths]
        >>> stream = SequenceStream.from_sequences(sequences, rows=2)
        >>> stream.rows, len(stream), stream.read(7).present.sum()
        (2, 7, tensor(12))
        """
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        data, drawn = read_sequences(sequences), seed if shuffle else None
        stream = cls.__new__(cls)
        stream._lay_out(LaidOut(data, rows, seed=drawn, epoch=0, static_once=static_once))
        return stream

    @classmethod
    def from_series(
        cls, series: Any, targets: Any = None, *, rows: int = 1, horizon: int | None = None
    ) -> SequenceStream:
        """Cut one long series into `rows` rows, which follow one another in time.

        Without targets, the stream forecasts: the target of step t is the series at t + horizon.
        The last `horizon` steps have no target and are left out. All others are used: the rows'
        lengths differ by at most one step, filled up by padding.

        Args:
            series: `(time,)` or `(time, features)`: a NumPy array, a tensor, or a pandas table or
                column. The model sees `(time, rows, features)`; a tensor of integers, such as
                tokens, keeps its shape.
            targets: of the same steps; None for the series itself.
            rows: number of rows (the batch size).
            horizon: how many steps ahead the targets lie; None is 1 without targets, else 0.

        Choosing `rows`: every row starts from the initial state, so let a row be many times as long
        as the memory that you expect. More rows run faster.

        >>> stream = SequenceStream.from_series(torch.arange(9.0), rows=2)
        >>> part = stream.read(4)
        >>> part.inputs[..., 0].T, part.targets[..., 0].T
        (tensor([[0., 1., 2., 3.],
                [4., 5., 6., 7.]]), tensor([[1., 2., 3., 4.],
                [5., 6., 7., 8.]]))
        """
        return cls.from_sequences(cut_series(series, targets, rows, horizon), rows)

    def _hold(self, data: Segment | LaidOut) -> None:
        self._all, self.length, self.rows = data, data.steps, data.rows
        self._digest: int | None = None

    def _lay_out(self, laid: LaidOut) -> None:
        self._laid = laid
        self._hold(laid)

    @property
    def _order(self) -> dict[str, int]:
        """What decides on the order of a shuffled stream."""
        if self._laid is None or self._laid.seed is None:
            return {}
        return {"seed": self._laid.seed, "epoch": self._laid.epoch}

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
        """Go back to the first step that carries a loss, in the same order."""
        self.cursor = self.burn_in

    def next_epoch(self) -> None:
        """Go back to the first step; a stream that shuffles takes a new order."""
        self.rewind()
        if self._laid is not None:
            self._go_to_epoch(self._laid.epoch + 1)

    def _go_to_epoch(self, epoch: int) -> None:
        if self._laid is not None and self._laid.epoch != epoch:
            self._lay_out(self._laid.of_epoch(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, with the size and a checksum of the data it belongs to."""
        if self._digest is None:
            self._digest = self._all.digest
        size = {"length": self.length, "rows": self.rows}
        return {"cursor": self.cursor, **size, **self._order, "digest": self._digest}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go back to a saved cursor; refuse data of another size, warn of other data."""
        if (saved["length"], saved["rows"]) != (self.length, self.rows):
            raise ValueError(
                f"the saved stream has {saved['length']} steps of {saved['rows']} rows, this one "
                f"{self.length} of {self.rows}"
            )
        if saved.get("seed") != self._order.get("seed"):
            raise ValueError(
                f"the saved stream was shuffled with seed {saved.get('seed')}, this one with "
                f"{self._order.get('seed')} (None: not shuffled): give it the same shuffle and seed"
            )
        self._go_to_epoch(saved.get("epoch", 0))
        self._digest = self._all.digest
        warn_of_other_data(saved, self._digest)
        self.cursor = int(saved["cursor"])
