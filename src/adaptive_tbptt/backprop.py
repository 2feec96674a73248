"""BPTT(K1, K2): K2 losses backpropagated over a window of K1 steps, divided by K2 (Eq. backprop).

A window counts steps: K1 steps with losses on the last K2, so the first K1 - K2 are context. One
loss truncated at K is (K + 1, 1); the paper's (2K, K) lets its earliest loss see lags 0..K and all
others more; (K, K) is what frameworks do; (T, T) is full backpropagation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .assumptions import warn_of_cuts, warn_of_no_mean
from .compiled import eager, plain
from .model import LossFn, Nest, Recurrent, slice_steps
from .precision import forget_casts
from .state import State, detach, leaves, map_leaves, reset_rows
from .stream import Segment

Weigh = Callable[[Nest], float]


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
    weigh: Weigh,
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
        weigh: how many losses some targets hold.
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
    weight = weigh(targets)
    if weight > 0:
        loss = loss_of_pieces(recurrent, loss_fn, read, targets, weigh)
    else:  # every target is masked: no loss, and a zero gradient
        held = [leaf.sum() for leaf in leaves(piece.state) if leaf.requires_grad]
        loss = torch.stack(held).sum() * 0 if held else torch.zeros((), requires_grad=True)
    return WindowPass(loss, weight, states)


def loss_of_pieces(
    recurrent: Recurrent, loss_fn: LossFn, pieces: list[Piece], targets: Nest, weigh: Weigh
) -> Tensor:
    """Return the loss of consecutive pieces.

    Where the features of a core are `(time, batch, ...)`, head and loss are called once, wherever
    rows start anew. Outputs may have any layout: they are not joined, and the pieces' means are
    weighted by their losses.

    Args:
        recurrent: the model.
        loss_fn: a mean over time and batch.
        pieces: of which some target counts.
        targets: of all of them, on any device.
        weigh: how many losses some targets hold.
    """
    if len(pieces) == 1 or _can_be_joined(recurrent, pieces, targets):
        features = pieces[0].features
        if len(pieces) > 1:
            read = [piece.features for piece in pieces]
            features = map_leaves(lambda *parts: torch.cat(parts, recurrent.time_dim), *read)
        return _loss(recurrent, loss_fn, features, targets, weigh)
    first, values, weights = pieces[0].start, [], []
    for piece in pieces:
        some = slice_steps(targets, piece.start - first, piece.stop - first)
        weight = weigh(some)
        if weight > 0:
            values.append(_loss(recurrent, loss_fn, piece.features, some, weigh))
            weights.append(weight)
    shares = [weight / sum(weights) for weight in weights]
    return torch.stack([value * share for value, share in zip(values, shares, strict=True)]).sum()


def _can_be_joined(recurrent: Recurrent, pieces: list[Piece], targets: Nest) -> bool:
    rows = leaves(targets)[0].shape[1]
    return recurrent.has_features and all(
        recurrent.is_laid_out(leaf, piece.stop - piece.start, rows)
        for piece in pieces
        for leaf in leaves(piece.features)
    )


def _loss(
    recurrent: Recurrent, loss_fn: LossFn, features: Any, targets: Nest, weigh: Weigh
) -> Tensor:
    outputs = recurrent.head(features)
    warn_of_no_mean(recurrent, loss_fn, outputs, targets, weigh)
    return recurrent.loss_of(loss_fn, outputs, recurrent.place(targets))


def refuse_sums(loss_fn: LossFn) -> None:
    """Refuse a loss that is visibly a sum: windows of other lengths would weigh differently."""
    if getattr(loss_fn, "reduction", "mean") != "mean":
        raise ValueError(
            f"the loss has reduction={loss_fn.reduction!r}: it must be a mean over time and "  # type: ignore[attr-defined]
            "batch, so that windows of other lengths weigh the same"
        )


def default_weigh(loss_fn: LossFn) -> Weigh:
    """Count every step of every row, as a loss with `ignore_index` and class weights does.

    A loss that is no module does not say what it ignores; torch's functions ignore -100 among
    targets that are classes, which are int64.
    """
    function = not isinstance(loss_fn, nn.Module)
    loss = loss_fn if function else plain(loss_fn)  # type: ignore[arg-type]
    ignored = getattr(loss, "ignore_index", -100 if function else None)
    weighted = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
    weights = getattr(loss, "weight", None) if weighted else None

    def weigh(targets: Nest) -> float:
        first = leaves(targets)[0]
        guessed = function and first.dtype != torch.int64
        if ignored is None or guessed or first.is_floating_point():
            return float(first.shape[0] * first.shape[1])
        first = first.long()  # -100 is 156 among bytes
        counted = first != ignored
        if weights is None:
            return float(counted.sum())
        return float(weights.to(first.device)[first[counted]].sum())

    return weigh
