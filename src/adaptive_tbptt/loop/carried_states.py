"""States of the stream at earlier steps, so that windows can start there whatever K becomes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..data.nest import BatchDims, State, leaves, pack, select_rows, unpack
from ..data.stream import Stream
from ..distributed.ranks import Packed, Ranks
from ..model.recurrent import Recurrent
from ..model.running import advance, entering


class CarriedStates:
    """Detached states by step number; the state at a step is the one that enters it."""

    def __init__(self) -> None:
        self._states: dict[int, State] = {}
        self._packed: list[tuple[int, list[Any] | None]] = []

    @property
    def oldest(self) -> int:
        """The earliest step whose state is known."""
        return min(self._states)

    @property
    def newest(self) -> int:
        """The latest step whose state is known."""
        return max([*self._states, *(step for step, _ in self._packed)])

    def begin(self, step: int, state: State) -> None:
        """Start anew from `state` at `step`; None is the state that a segment begins with."""
        self._states, self._packed = {step: state}, []

    def put(self, step: int, state: State) -> None:
        """Store the state that enters `step`; it replaces an older one."""
        self._states[step] = state

    def at(self, step: int, recurrent: Recurrent, stream: Stream) -> State:
        """Return the state that enters `step`, run forward from the nearest earlier one."""
        if step not in self._states:
            nearest = max(s for s in self._states if s < step)
            segment = stream.segment(nearest, step)
            self._states[step] = advance(recurrent, segment, self._states[nearest])
        if self._states[step] is None:  # from here on a checkpoint holds it
            self._states[step] = entering(recurrent, stream.segment(step, step + 1))
        return self._states[step]

    def forget(self, before: int) -> None:
        """Drop the states that no window starting at `before` or later needs."""
        for step in sorted([s for s in self._states if s <= before])[:-1]:
            del self._states[step]

    @property
    def is_empty(self) -> bool:
        """Whether no state was stored or loaded yet."""
        return not self._states and not self._packed

    def state_dict(self, ranks: Ranks, recurrent: Recurrent) -> Packed:
        """Return steps and the leaves of their states, the rows of all processes together."""
        if self._packed:
            return [list(entry) for entry in self._packed]
        packed = [
            [step, None if state is None else pack(state)]
            for step, state in sorted(self._states.items())
        ]
        return ranks.join(packed, recurrent)

    def load_state_dict(self, saved: Packed) -> None:
        """Take saved states; `open` gives them their structure once the model's is known."""
        self._packed = [(step, items) for step, items in saved]
        self._states = {}

    def open(self, recurrent: Recurrent, stream: Stream, ranks: Ranks) -> None:
        """Give loaded states the structure of the model's state, and keep this process's rows."""
        if not self._packed:
            return
        inputs = recurrent.place(stream.segment(stream.cursor - 1, stream.cursor).inputs)
        template, dims = recurrent.template(inputs), recurrent.dims(inputs)
        for step, items in self._packed:
            state = None
            if items is not None:
                state = recurrent.place(unpack(template, items))
                if ranks.count > 1:
                    state = select_rows(state, _own(ranks, state, dims), dims)
                recurrent.check_rows(state, inputs)
            self._states[step] = state
        self._packed = []


def start_state(recurrent: Recurrent, stream: Stream) -> State:
    """Return the state after the burn-in of a stream at its start; without burn-in None."""
    if not stream.burn_in or stream.cursor != stream.burn_in:
        return None
    return advance(recurrent, stream.segment(0, stream.burn_in), None)


def _own(ranks: Ranks, state: State, dims: BatchDims) -> Tensor:
    """Return the indices of this process's rows in a state that holds all rows."""
    rows = next(x.shape[dim] for x, dim in zip(leaves(state), dims, strict=True) if dim is not None)
    own = ranks.own_rows(rows)
    return torch.arange(own.start, own.stop)
