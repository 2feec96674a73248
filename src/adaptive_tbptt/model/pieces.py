"""BPTT(K1, K2): K2 losses backpropagated over a window of K1 steps, divided by K2 (Eq. backprop).

A window counts steps: K1 steps with losses on the last K2, so the first K1 - K2 are context. One
loss truncated at K is (K + 1, 1); the paper's (2K, K) lets its earliest loss see lags 0..K and all
others more; (K, K) is what frameworks do; (T, T) is full backpropagation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from .._torch.compiling import eager
from .._torch.number_formats import forget_casts
from ..data.nest import State, detach
from ..data.rows import reset_rows
from ..data.segment import Segment, slice_steps
from .checks import warn_of_cuts
from .recurrent import Recurrent


class Piece(NamedTuple):
    """Steps `start` to `stop` of a segment, run in one call."""

    start: int
    stop: int
    features: Any
    state: State


def run(
    recurrent: Recurrent, segment: Segment, state: State, marks: Iterable[int] = ()
) -> Iterator[Piece]:
    """Run a segment in as few calls as its marks and the starts of sequences in it allow.

    Args:
        recurrent: the model.
        segment: time first, on any device.
        state: state entering the segment; None is the initial state.
        marks: steps of the segment before which a piece must end.
    """
    cuts = {0, segment.steps, *marks}
    resets = segment.resets
    if resets is not None and not resets.any():
        resets = None
    if resets is not None:
        cuts |= set(torch.nonzero(resets.any(dim=1)).flatten().tolist())
    inputs = recurrent.place(segment.inputs)
    warn_of_cuts(recurrent, inputs)
    for start, stop in pairwise(sorted(cuts)):
        if resets is not None:
            initial = recurrent.initial_state(inputs)
            state = initial if state is None else state
            state = reset_rows(state, resets[start], initial, recurrent.dims(inputs))
        features, state = recurrent.core(slice_steps(inputs, start, stop), state)
        yield Piece(start, stop, features, state)


def advance(recurrent: Recurrent, segment: Segment, state: State) -> State:
    """Return the state after a segment, without gradient."""
    forget_casts()
    with torch.no_grad(), eager():
        for piece in run(recurrent, segment, state):
            state = piece.state
    forget_casts()
    return detach(state)
