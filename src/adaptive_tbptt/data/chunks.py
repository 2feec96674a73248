"""A stream fed by an iterable of consecutive chunks, such as a DataLoader; memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from .nest import Nest, State, detach, map_leaves
from .padding import Padded, as_padded
from .segment import Segment, time_first
from .start import Start
from .stream import Stream, warn_of_other_data

Chunks = Iterable[Any]
END = object()  # of a source; None would be a chunk that is wrong


class ChunkStream(Stream):
    """Consecutive chunks `(inputs, targets)` or `(inputs, targets, resets)`, each time first.

    Row r of a chunk continues row r of the chunk before. The stream keeps only the steps that
    windows and the probe still need, and draws random segments from these.

    Args:
        source: an iterable that can be read once per epoch (a list, a DataLoader), or a function
            that returns an iterator. A generator can be read once only. Chunks are copied, except
            those of a list or tuple, so a source may fill the same buffer again.
        state: the state that enters the first step of every epoch, as in `SequenceStream`.

    >>> chunks = [(torch.zeros(5, 2, 3), torch.zeros(5, 2)) for _ in range(4)]
    >>> stream = ChunkStream(chunks)
    >>> stream.rows, stream.read(8).steps, stream.available(100)
    (2, 8, 20)
    """

    def __init__(
        self, source: Chunks | Callable[[], Iterator[Any]], *, state: State = None
    ) -> None:
        if isinstance(source, DataLoader) and shuffles(source):
            raise ValueError(
                "the DataLoader shuffles: its chunks do not continue each other, so the state "
                "carried from one to the next would be wrong. Use shuffle=False"
            )
        self._source, self._state = source, detach(state)
        self._keep = 0  # steps reserved for random segments
        self._length: int | None = None
        self._begun = False
        self._stale = True  # iter() of a loader may draw random numbers: not before the first read
        self._held: list[Segment] = []
        self._first = 0  # step number of the first step held

    def _renew(self) -> None:
        """Restart the source if the chunks held belong to the epoch before."""
        if not self._stale:
            return
        iterator = self._source() if callable(self._source) else iter(self._source)
        if iterator is self._source and self._begun:
            raise ValueError(
                "the source of this stream can be read only once: for several epochs pass a "
                "list, a DataLoader, or a function that returns an iterator"
            )
        self._iterator, self._begun, self._stale = iterator, True, False
        self._held, self._first, self.cursor = [], 0, 0

    @property
    def rows(self) -> int:
        """Number of rows (the batch size)."""
        self._renew()
        if not self._held:
            self._pull()
        return self._held[0].rows

    @property
    def length(self) -> int | None:
        """Steps of each row; None until the source has been read to its end."""
        return self._length

    @property
    def _end(self) -> int:
        return self._first + sum(part.steps for part in self._held)

    def _pull(self) -> bool:
        """Read one more chunk; return whether there was one."""
        self._renew()
        chunk = next(self._iterator, END)
        if chunk is END:
            if not self._end:
                raise ValueError(
                    "the source of this stream is empty: it yields no chunk. An iterator that was "
                    "read before stays empty; pass a list, a DataLoader, or a function that "
                    "returns a new iterator"
                )
            self._length = self._end
            return False
        if isinstance(chunk, Segment):  # only the stream has a start of its own
            chunk = chunk.inputs, chunk.targets, chunk.resets
        if not isinstance(chunk, tuple | list) or len(chunk) not in (2, 3):
            raise TypeError(
                "every chunk must be (inputs, targets) or (inputs, targets, resets), got "
                f"{type(chunk).__name__} at step {self._end}"
            )
        part = time_first(*chunk)
        if not isinstance(self._source, list | tuple):  # it may fill the same memory again
            part = map_leaves(torch.clone, part)
        if self._held and part.rows != self._held[0].rows:
            raise ValueError(
                f"the chunk at step {self._end} has {part.rows} rows, those before it "
                f"{self._held[0].rows}: every chunk continues the same rows. If a DataLoader's "
                "last batch is smaller, pass drop_last=True"
            )
        self._held.append(part)
        return True

    def available(self, stop: int) -> int:
        """Read chunks until step `stop` is there; return how far the data goes."""
        self._renew()
        while self._end < stop and self._pull():
            pass
        return min(stop, self._end)

    def segment(self, start: int, stop: int) -> Segment:
        """Return steps `start` to `stop`."""
        self._renew()
        if start < self._first or stop > self._end:
            raise ValueError(
                f"the stream holds only steps {self._first} to {self._end}, not {start} to {stop}"
            )
        parts, at = [], self._first
        for part in self._held:
            a, b = max(start - at, 0), min(stop - at, part.steps)
            if a < b:
                parts.append(part.between(a, b))
            at += part.steps
        found = _join(parts)
        if self._state is None or start:
            return found
        return found._replace(start=Start(self._state, found.rows))

    def forget(self, before: int) -> None:
        """Drop whole chunks before the step, unless they are reserved for the probe."""
        while len(self._held) > 1:
            after = self._first + self._held[0].steps
            if after > before or self._end - after < self._keep:
                break
            self._held.pop(0)
            self._first = after

    def reserve(self, steps: int) -> None:
        """Keep at least `steps` steps for random segments."""
        self._keep = max(self._keep, steps)

    def random_segment(self, steps: int, generator: torch.Generator | None = None) -> Segment:
        """Cut a segment out of the steps held; read ahead if they are too few."""
        self._renew()
        stop = self.available(self._first + steps)
        return self.segment(self._first, max(stop, self._end)).shifted(steps, generator)

    def peek(self, steps: int) -> Segment:
        """Return up to `steps` of the steps held; read a chunk only if none is held."""
        self.available(self.cursor + 1)
        return self.segment(self.cursor, min(self.cursor + steps, self._end))

    def rewind(self) -> None:
        """Go back to the first step; restart the source only if the stream has left that step."""
        self._stale = self._stale or bool(self.cursor or self._first)
        self.cursor = 0

    def state_dict(self, *, data: bool = False) -> dict[str, Any]:
        """Return the cursor and the range of steps held; with `data` the steps themselves too.

        `data` is for a source that resumes where it stopped and cannot be reread from its start.
        """
        # Chunks still held after a rewind belong to the epoch before.
        first, end, held = (0, 0, []) if self._stale else (self._first, self._end, self._held)
        saved: dict[str, Any]
        saved = {"cursor": self.cursor, "first": first, "end": end, "keep": self._keep}
        if held:
            saved["digest"] = held[-1].digest
        if data:  # copies: a chunk may be a view of a tensor far larger, which would be saved whole
            saved["held"] = [_plain(map_leaves(torch.clone, part)) for part in held]
        return saved

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Read the source again up to the saved cursor, unless the steps held were saved too."""
        if "held" in saved:
            self._renew()
            self._first = saved["first"]
            self._held = [_from_plain(*part) for part in saved["held"]]
        else:
            self._stale = self._stale or self._end > 0
            if saved["end"]:  # otherwise nothing was read yet
                self._reread(saved["first"], saved["end"])
                warn_of_other_data(saved, self._held[-1].digest)
        self._keep, self.cursor = saved["keep"], saved["cursor"]

    def _reread(self, first: int, end: int) -> None:
        """Read the source up to step `end`; hold the chunks from step `first` on."""
        self._renew()
        while self._end < end and self._pull():
            while self._held and self._first + self._held[0].steps <= first:
                self._first += self._held.pop(0).steps
        if (self._first, self._end) != (first, end):
            raise ValueError(
                f"the source does not yield the chunks that were saved: steps {first} "
                f"to {end} expected, {self._first} to {self._end} found"
            )


def shuffles(loader: DataLoader[Any]) -> bool:
    """Tell whether a loader reads its data in random order."""
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    random = RandomSampler | SubsetRandomSampler | WeightedRandomSampler
    return any(
        isinstance(s, random) or (isinstance(s, DistributedSampler) and s.shuffle) for s in samplers
    )


def _plain(part: Segment) -> list[Nest]:
    """Return a part without classes of this library, so that torch loads it with weights_only."""
    targets = part.targets.targets if isinstance(part.targets, Padded) else part.targets
    return [part.inputs, targets, part.resets, part.present]


def _from_plain(
    inputs: Nest, targets: Nest, resets: Tensor | None, present: Tensor | None = None
) -> Segment:
    """Undo `_plain`; releases before padding saved no `present`."""
    return Segment(inputs, targets if present is None else Padded(targets, present), resets)


def _join(parts: list[Segment]) -> Segment:
    if len(parts) == 1:
        return parts[0]
    given = next((part.resets for part in parts if part.resets is not None), None)
    if given is not None:
        parts = [
            part._replace(resets=given.new_zeros(part.steps, part.rows))
            if part.resets is None
            else part
            for part in parts
        ]
    if any(part.present is not None for part in parts):
        parts = [part._replace(targets=as_padded(part.targets)) for part in parts]
    joined: Segment = map_leaves(lambda *x: torch.cat(x), *parts)
    return joined
