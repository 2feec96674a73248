"""TODO."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch.number_formats import forget_casts
from ..data.nest import State, detach, leaves
from ..data.segment import Segment, slice_steps
from ..model.losses import CountLosses, loss_of_pieces
from ..model.pieces import Piece, run
from ..model.recurrent import LossFn, Recurrent


class WindowPass(NamedTuple):
    """The forward pass of a window: its loss, what it weighs, and states on the way."""

    loss: Tensor
    weight: float
    states: dict[int, State]


def window_forward(
    recurrent: Recurrent,
    loss_fn: LossFn,
    segment: Segment,
    state: State,
    context: int,
    count_losses: CountLosses,
    marks: Iterable[int] = (),
) -> WindowPass:
    """Run a window whose steps from `context` on carry losses.

    Args:
        recurrent: the model.
        loss_fn: a mean over time and batch.
        segment: the K1 steps of the window.
        state: state entering it; a detached copy is used.
        context: K1 - K2, the steps without a loss. Where the model exposes core and head, no head
            is computed for them.
        count_losses: how many losses some targets hold.
        marks: further steps, at most `context`, whose entering state is wanted.

    Returns:
        The mean loss with its graph, the number of losses, and the detached state entering every
        mark, the first loss, and the step after the window.
    """
    forget_casts()
    state = detach(state)
    stops = {context, *marks} - {0}
    states: dict[int, State] = {}
    read: list[Piece] = []
    for piece in run(recurrent, segment, state, stops):
        if piece.stop in (*stops, segment.steps):  # not where a row happens to start anew
            states[piece.stop] = detach(piece.state)
        if piece.start >= context:
            read.append(piece)
    targets = slice_steps(segment.targets, context, None)
    weight = count_losses(targets)
    if weight > 0:
        loss = loss_of_pieces(recurrent, loss_fn, read, targets, count_losses)
    else:  # every target is masked: no loss, and a zero gradient
        held = [leaf.sum() for leaf in leaves(piece.state) if leaf.requires_grad]
        loss = torch.stack(held).sum() * 0 if held else torch.zeros((), requires_grad=True)
    return WindowPass(loss, weight, states)
