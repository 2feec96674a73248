"""TODO."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .nest import State, map_leaves, named_leaves

BatchDims = list[int | None]


"""The batch dimension of each tensor leaf, in the order of `leaves`; None where it has none."""


def _with_dims(fn: Callable[..., Tensor], dims: BatchDims, state: State, *others: State) -> State:
    remaining = iter(dims)

    def apply(leaf: Tensor, *rest: Tensor) -> Tensor:
        dim = next(remaining)
        return leaf if dim is None else fn(dim, leaf, *rest)

    return map_leaves(apply, state, *others)


def select_rows(state: State, rows: Tensor, dims: BatchDims) -> State:
    """Keep only the given rows (indices) of every leaf that has a batch dimension."""
    return _with_dims(lambda dim, leaf: leaf.index_select(dim, rows.to(leaf.device)), dims, state)


def join_rows(states: list[State], dims: BatchDims) -> State:
    """Put states of the same structure side by side, as rows of one."""
    return _with_dims(lambda dim, *parts: torch.cat(parts, dim), dims, states[0], *states[1:])


def per_row(values: Tensor, leaf: Tensor, dim: int) -> Tensor:
    """Shape `(rows,)` values so that they apply to the rows of a leaf."""
    shape = [1] * leaf.dim()
    shape[dim] = -1
    return values.view(shape)


def reset_rows(state: State, mask: Tensor, initial: State, dims: BatchDims) -> State:
    """Return rows where `mask` is true to `initial`, and cut their gradient.

    Args:
        state: the nest to change; it is not modified.
        mask: `(rows,)` boolean.
        initial: a nest of the same structure, with as many rows.
        dims: batch dimension of each leaf.
    """

    def apply(dim: int, leaf: Tensor, start: Tensor) -> Tensor:
        # where() sends exact zeros back to the row it did not take, whatever the values are.
        # A state that autocast left in bfloat16 stays in it.
        return torch.where(per_row(mask.to(leaf.device), leaf, dim), start.to(leaf.dtype), leaf)

    return _with_dims(apply, dims, state, initial)


def batch_dims(one: State, two: State) -> BatchDims:
    """Find the batch dimension of each leaf by comparing a one-row state with a two-row state.

    A wrapped `nn.LSTM` has it at 1, most cells at 0; a leaf whose shape does not depend on the
    number of rows has none.

    >>> batch_dims(torch.zeros(3, 1, 5), torch.zeros(3, 2, 5))
    [1]
    """
    dims: BatchDims = []
    for (name, a), (_, b) in zip(named_leaves(one), named_leaves(two), strict=True):
        differing = [d for d in range(a.dim()) if a.shape[d] != b.shape[d]]
        if a.dim() != b.dim() or len(differing) > 1:
            raise ValueError(
                f"cannot tell the batch dimension of state leaf '{name}': it is "
                f"{tuple(a.shape)} for one row and {tuple(b.shape)} for two; "
                "pass state_batch_dim="
            )
        dims.append(differing[0] if differing else None)
    return dims
