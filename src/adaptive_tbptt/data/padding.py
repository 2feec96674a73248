"""Padding: steps that fill up a row, and never reach the loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .nest import Nest, leaf_label, leaves, map_leaves, named_leaves


class Padded(NamedTuple):
    """Targets of which some are padding: only those of present steps reach `loss_fn`.

    A stream takes it in place of its targets. `SequenceStream.from_sequences` makes it for you.

    The model reads the inputs at padding, so they must be finite; targets may be NaN there.

    Where a window has padding, `loss_fn` sees the n present steps of all rows as `(n, 1, ...)`, or
    as `(1, n, ...)` if the model is batch first. The number of dimensions stays the same, so any
    mean over time and batch works. Where a window has none, nothing changes.

    Attributes:
        targets: a tensor, or a nest of tensors, `(time, batch, ...)`.
        present: `(time, batch)` boolean, false at padding.

    >>> from adaptive_tbptt import SequenceStream
    >>> present = torch.arange(6)[:, None] < torch.tensor([6, 4])  # the second row ends earlier
    >>> stream = SequenceStream(torch.zeros(6, 2, 3), Padded(torch.zeros(6, 2), present))
    >>> stream.read(6).present.sum(dim=0)
    tensor([6, 4])
    """

    targets: Nest
    present: Tensor


def as_padded(targets: Nest) -> Padded:
    """Mark every step of time-first targets as present, unless they are marked already."""
    if isinstance(targets, Padded):
        return targets
    first = leaves(targets)[0]
    return Padded(targets, first.new_ones(first.shape[:2], dtype=torch.bool))


def without_padding(targets: Nest) -> Nest:
    """Return the targets of present steps, `(n, 1, ...)`; without padding, all of them."""
    if not isinstance(targets, Padded):
        return targets
    values, present = targets
    if bool(present.all()):
        return values
    return map_leaves(lambda leaf: _select(leaf, present).unsqueeze(1), values)


def drop_padding(
    outputs: Any, targets: Nest, batch_first: bool, flat: bool = True
) -> tuple[Any, Nest]:
    """Return outputs and targets of present steps, in the same order; targets are time first.

    Args:
        outputs: a nest of `(time, batch, ...)`, `(batch, time, ...)` if `batch_first`, or of either
            with its first two dimensions flattened into one.
        targets: time first.
        batch_first: layout of the outputs.
        flat: whether outputs may be flattened; False if that was seen to be in another order.
    """
    if not isinstance(targets, Padded):
        return outputs, targets
    kept = without_padding(targets)
    if kept is targets.targets:  # nothing is padded here
        return outputs, kept
    present = targets.present
    axes = tuple(present.shape[::-1] if batch_first else present.shape)
    order = "(batch, time)" if batch_first else "(time, batch)"

    def of_leaf(leaf: Tensor) -> Tensor:
        flat = leaf.shape[:2] != axes
        if flat:
            leaf = leaf.unflatten(0, axes)
        some = _select(leaf.transpose(0, 1) if batch_first else leaf, present)
        return some if flat else some.unsqueeze(0 if batch_first else 1)

    for name, leaf in named_leaves(outputs):
        flattened = flat and leaf.shape[:1] == (axes[0] * axes[1],)
        if leaf.shape[:2] != axes and not flattened:
            raise ValueError(
                f"the outputs{leaf_label(name)} have shape {tuple(leaf.shape)}: to drop padded "
                f"steps, their first axes must be {order} = {axes}, or flattened in this order, "
                f"{axes[0] * axes[1]}. Return them so, or give sequences that need no padding"
            )
    return map_leaves(of_leaf, outputs), kept


def _select(leaf: Tensor, present: Tensor) -> Tensor:
    """Return `(n, ...)`, the present steps of a time-first leaf."""
    index = present.to(leaf.device).flatten().nonzero().flatten()
    return leaf.flatten(0, 1)[index]
