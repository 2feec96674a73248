"""BPTT(K1, K2): K2 losses backpropagated over a window of K1 steps, divided by K2 (Eq. backprop).

A window counts steps: K1 steps with losses on the last K2, so the first K1 - K2 are context. One
loss truncated at K is (K + 1, 1). In the paper's (2K, K) the earliest loss sees lags 0..K, all
others see more. (K, K) is what frameworks do; (T, T) is full backpropagation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.number_formats import forget_casts
from .._torch.recompute import run_again
from ..data.nest import Nest, State, detached_copy, leaves, map_leaves, slice_steps
from ..data.segment import Segment
from ..model.objective import Objective
from ..model.recurrent import Recurrent
from ..model.running import Piece, run_pieces


class WindowPass(NamedTuple):
    """The forward pass of a window.

    Attributes:
        loss: the mean loss, with its graph.
        losses: the number of losses in that mean.
        states: detached states by step of the window.
    """

    loss: Tensor
    losses: float
    states: dict[int, State]


class Recompute(NamedTuple):
    """Hold the graph of a few steps at a time; the backward pass runs the others again.

    Attributes:
        steps: the most steps whose graph is in memory at once.
        uncompiled: whether the window runs uncompiled.
    """

    steps: int
    uncompiled: bool = False

    def cuts(self, stops: Iterable[int]) -> set[int]:
        """Cut the stretches between stops so that no piece has more than `steps` steps."""
        ends = sorted({0, *stops})
        return {cut for a, b in pairwise(ends) for cut in range(a, b, self.steps)}

    def core(self, recurrent: Recurrent, inputs: Nest, state: State) -> tuple[Any, State]:
        """Run a piece that will run again."""
        # A copy: the state may be a view, which would keep all that the piece before computed.
        copy = map_leaves(Tensor.clone, state)
        found: tuple[Any, State] = run_again(
            recurrent.module, recurrent.core, inputs, copy, uncompiled=self.uncompiled
        )
        return found


def window_forward(
    objective: Objective,
    segment: Segment,
    state: State,
    context: int,
    marks: Iterable[int] = (),
    factors: Mapping[int, float] | None = None,
    recompute: Recompute | None = None,
) -> WindowPass:
    """Run a window whose steps from `context` on carry losses.

    Args:
        objective: model and loss.
        segment: the K1 steps of the window.
        state: the detached state entering it.
        context: K1 - K2, the steps without a loss. If the model exposes core and head, the head
            does not run for them.
        marks: further steps whose entering state to return. Those above `context` cut the losses.
        factors: by step, at most `context`, the factor on the gradient of the state there.
        recompute: how to run a window of more than `recompute.steps` steps; None holds all of it.

    Returns:
        The loss, its count, and the detached state entering every mark, the first loss, and the
        step after the window.
    """
    forget_casts()
    stops = {context, *marks, *(factors or ()), segment.steps} - {0}
    states: dict[int, State] = {}
    read: list[Piece] = []
    cuts, core, recurrent = set(stops), None, objective.recurrent
    if recompute is not None and segment.steps > recompute.steps:
        cuts |= recompute.cuts(stops)
        core = partial(recompute.core, recurrent)
    for piece in run_pieces(recurrent, segment, state, cuts, factors, core):
        if piece.stop in stops:  # not at a reset in between
            # A copy: a module may overwrite the state it returned, and a view keeps its whole.
            states[piece.stop] = detached_copy(piece.state)
        if piece.start >= context:
            read.append(piece)
    targets = slice_steps(segment.targets, context, None) if context else segment.targets
    count = objective.count_losses(targets)
    if count > 0:
        loss = objective.loss_of_pieces(read, targets)
    else:  # every target is masked: no loss, and a zero gradient
        held = [leaf.sum() for leaf in leaves(piece.state) if leaf.requires_grad]
        loss = torch.stack(held).sum() * 0 if held else torch.zeros((), requires_grad=True)
    return WindowPass(loss, count, states)
