"""TODO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.compiling import plain
from ..data.nest import Nest, leaves, map_leaves
from ..data.segment import slice_steps
from .checks import warn_of_no_mean
from .pieces import Piece
from .recurrent import LossFn, Recurrent

CountLosses = Callable[[Nest], float]


def loss_of_pieces(
    recurrent: Recurrent,
    loss_fn: LossFn,
    pieces: list[Piece],
    targets: Nest,
    count_losses: CountLosses,
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
        count_losses: how many losses some targets hold.
    """
    if len(pieces) == 1 or _can_be_joined(recurrent, pieces, targets):
        features = pieces[0].features
        if len(pieces) > 1:
            read = [piece.features for piece in pieces]
            features = map_leaves(lambda *parts: torch.cat(parts, recurrent.time_dim), *read)
        return _loss(recurrent, loss_fn, features, targets, count_losses)
    first, values, weights = pieces[0].start, [], []
    for piece in pieces:
        some = slice_steps(targets, piece.start - first, piece.stop - first)
        weight = count_losses(some)
        if weight > 0:
            values.append(_loss(recurrent, loss_fn, piece.features, some, count_losses))
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
    recurrent: Recurrent, loss_fn: LossFn, features: Any, targets: Nest, count_losses: CountLosses
) -> Tensor:
    outputs = recurrent.head(features)
    warn_of_no_mean(recurrent, loss_fn, outputs, targets, count_losses)
    return recurrent.loss_of(loss_fn, outputs, recurrent.place(targets))


def refuse_sums(loss_fn: LossFn) -> None:
    """Refuse a loss that is visibly a sum: windows of other lengths would weigh differently."""
    if getattr(loss_fn, "reduction", "mean") != "mean":
        raise ValueError(
            f"the loss has reduction={loss_fn.reduction!r}: it must be a mean over time and "  # type: ignore[attr-defined]
            "batch, so that windows of other lengths weigh the same"
        )


def default_count(loss_fn: LossFn) -> CountLosses:
    """Count every step of every row, as a loss with `ignore_index` and class weights does.

    A loss that is no module does not say what it ignores; torch's functions ignore -100 among
    targets that are classes, which are int64.
    """
    function = not isinstance(loss_fn, nn.Module)
    loss = loss_fn if function else plain(loss_fn)  # type: ignore[arg-type]
    ignored = getattr(loss, "ignore_index", -100 if function else None)
    weighted = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
    weights = getattr(loss, "weight", None) if weighted else None

    def count_losses(targets: Nest) -> float:
        first = leaves(targets)[0]
        guessed = function and first.dtype != torch.int64
        if ignored is None or guessed or first.is_floating_point():
            return float(first.shape[0] * first.shape[1])
        first = first.long()  # -100 is 156 among bytes
        counted = first != ignored
        if weights is None:
            return float(counted.sum())
        return float(weights.to(first.device)[first[counted]].sum())

    return count_losses
