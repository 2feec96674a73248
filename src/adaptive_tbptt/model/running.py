"""Run a module over a segment: in as few calls as possible, or one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.compiling import eager
from .._torch.number_formats import forget_casts
from ..data.nest import Nest, State, detach, map_leaves, reset_rows, slice_steps, steps_of
from ..data.segment import Segment
from .recurrent import Recurrent


class Piece(NamedTuple):
    """Steps `start` to `stop` of a segment, run in one call: features, and the state they leave."""

    start: int
    stop: int
    features: Any
    state: State


def run_pieces(
    recurrent: Recurrent,
    segment: Segment,
    state: State,
    cuts: Iterable[int] = (),
    factors: Mapping[int, float] | None = None,
) -> Iterator[Piece]:
    """Run a segment in as few calls as `cuts` and the resets in it allow.

    Args:
        recurrent: the model.
        segment: time first, on any device.
        state: state entering the segment; None is the initial state.
        cuts: steps of the segment before which a piece must end.
        factors: by cut, the factor on the gradient of the state there.
    """
    steps, resets = segment.steps, segment.resets
    ends = {0, steps, *cuts}
    if resets is not None:
        at = torch.nonzero(resets.any(dim=1)).flatten().tolist()
        ends |= set(at)
        resets = resets if at else None
    inputs = recurrent.place(segment.inputs)
    for start, stop in pairwise(sorted(ends)):
        if resets is not None:
            initial = recurrent.initial_state(inputs)
            state = initial if state is None else state
            state = reset_rows(state, resets[start], initial, recurrent.dims(inputs))
        part = inputs if stop - start == steps else slice_steps(inputs, start, stop)
        features, state = recurrent.core(part, state)
        yield Piece(start, stop, features, state)
        if factors and stop in factors:
            state = scale_gradient(state, factors[stop])


def scale_gradient(state: State, factor: float) -> State:
    """Return the same state; the backward pass multiplies its gradient by `factor`."""

    def scaled(leaf: Tensor) -> Tensor:
        if leaf.requires_grad:
            leaf = leaf.view_as(leaf)  # an alias: other readers of the leaf stay unscaled
            leaf.register_hook(lambda gradient: gradient * factor)
        return leaf

    return map_leaves(scaled, state)


def advance(recurrent: Recurrent, segment: Segment, state: State) -> State:
    """Return the state after a segment, without gradient."""
    forget_casts()
    with torch.no_grad(), eager():
        for piece in run_pieces(recurrent, segment, state):
            state = piece.state
    forget_casts()
    return detach(state)


def warm_up(recurrent: Recurrent, segment: Segment, burn_in: int, state: State = None) -> State:
    """Return the detached state after the first `burn_in` steps; None is the initial state."""
    if burn_in:
        return advance(recurrent, segment.between(0, burn_in), state)
    return detach(recurrent.initial_state(segment.inputs) if state is None else state)


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
    """Yield every step of time-first `inputs`, starting from `state`, which must not be None.

    Args:
        recurrent: the model.
        inputs: `(steps, rows, ...)`.
        state: state entering the first step.
        resets: `(steps, rows)`, true where a row starts a new sequence before that step.
        prepare: applied to the state that enters a step, before any reset.
    """
    initial = None if resets is None else recurrent.initial_state(inputs)
    for t in range(steps_of(inputs)):
        state = entering = state if prepare is None else prepare(state)
        if resets is not None:
            state = reset_rows(state, resets[t], initial, recurrent.dims(inputs))
        features, state = recurrent.core(slice_steps(inputs, t, t + 1), state)
        yield Step(entering, features, state)
