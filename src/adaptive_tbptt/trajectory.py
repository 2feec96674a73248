"""Where windows may start: the stream's state at earlier steps, so that K may jump at any time."""

from __future__ import annotations

from typing import Any

from .backprop import advance
from .model import Recurrent
from .state import State, pack, unpack
from .stream import Stream


class Trajectory:
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

    def begin(self, step: int) -> None:
        """Start anew from the initial state at `step`."""
        self._states, self._packed = {step: None}, []

    def put(self, step: int, state: State) -> None:
        """Note the state that enters `step`; a newer one replaces an older one."""
        self._states[step] = state

    def at(self, step: int, recurrent: Recurrent, stream: Stream) -> State:
        """Return the state that enters `step`, run forward from the nearest earlier one."""
        nearest = max(s for s in self._states if s <= step)
        if nearest < step:
            segment = stream.segment(nearest, step)
            self._states[step] = advance(recurrent, segment, self._states[nearest])
        return self._states[step]

    def forget(self, before: int) -> None:
        """Drop what no window that starts at `before` or later needs."""
        needed = max((s for s in self._states if s <= before), default=self.oldest)
        self._states = {s: state for s, state in self._states.items() if s >= needed}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was noted or loaded yet."""
        return not self._states and not self._packed

    def state_dict(self) -> list[list[Any]]:
        """Return steps and the leaves of their states."""
        if self._packed:
            return [list(entry) for entry in self._packed]
        return [
            [step, None if state is None else pack(state)]
            for step, state in sorted(self._states.items())
        ]

    def load_state_dict(self, saved: list[list[Any]]) -> None:
        """Take saved states; they get their structure once the model's is known (`open`)."""
        self._packed = [(step, items) for step, items in saved]
        self._states = {}

    def open(self, recurrent: Recurrent, stream: Stream) -> None:
        """Give loaded states the structure that the model's state has."""
        if not self._packed:
            return
        inputs = stream.segment(stream.cursor - 1, stream.cursor).inputs
        template = recurrent.template(recurrent.place(inputs))
        for step, items in self._packed:
            state = None if items is None else recurrent.place(unpack(template, items))
            self._states[step] = state
            if state is not None:
                recurrent.check_rows(state, inputs)
        self._packed = []
