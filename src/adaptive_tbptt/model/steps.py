"""Run a recurrent module one step at a time, with sequence ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from ..data.nest import Nest, State
from ..data.rows import reset_rows
from ..data.segment import slice_steps, steps_of
from .recurrent import Recurrent


class Step(NamedTuple):
    """One step: the state that entered it, what the readout sees, the state that left it."""

    entering: State
    features: Any
    leaving: State


def unroll(
    recurrent: Recurrent,
    inputs: Nest,
    state: State,
    resets: Tensor | None = None,
    prepare: Callable[[State], State] | None = None,
) -> Iterator[Step]:
    """Yield every step of time-first `inputs`, starting from `state`.

    Args:
        recurrent: the model.
        inputs: `(steps, rows, ...)`.
        state: state entering the first step; not None.
        resets: `(steps, rows)`, true where a row starts anew before that step.
        prepare: applied to the state that enters a step, before any reset.
    """
    initial = None if resets is None else recurrent.initial_state(inputs)
    for t in range(steps_of(inputs)):
        entering = state if prepare is None else prepare(state)
        state = entering
        if resets is not None:
            state = reset_rows(state, resets[t], initial, recurrent.dims(inputs))
        features, state = recurrent.core(slice_steps(inputs, t, t + 1), state)
        yield Step(entering, features, state)
