"""Recurrent state as any nest of tensors: tuple, list, dict, dataclass, or one tensor.

The rest of the library handles states only through these functions. Leaves that are not tensors (a
step counter, a string, None) pass through untouched.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

Nest = Any
"""A nest of tensors: tuple, list, dict, dataclass, or one tensor."""

State = Any
"""A nest of tensors. PyTorch's own modules use a tensor (RNN, GRU) or a pair (LSTM)."""

BatchDims = list[int | None]
"""The batch dimension of each tensor leaf, in the order of `leaves`; None where it has none."""


def map_leaves(
    fn: Callable[..., Any], nest: State, *others: State, tensors_only: bool = True
) -> State:
    """Apply `fn` to corresponding tensor leaves of nests of equal structure.

    Leaves that are not tensors are left as they are, unless `tensors_only` is False.

    >>> map_leaves(lambda a, b: a + b, (torch.ones(1), None), (torch.ones(1), None))
    (tensor([2.]), None)
    """
    if isinstance(nest, Tensor):  # first, because most of a training loop's calls end here
        return fn(nest, *others)
    if not others and type(nest) is tuple:  # an LSTM's state, several times in every window
        return tuple(
            [
                fn(x) if isinstance(x, Tensor) else map_leaves(fn, x, tensors_only=tensors_only)
                for x in nest
            ]
        )
    if isinstance(nest, tuple | list):
        items = [
            map_leaves(fn, *parts, tensors_only=tensors_only)
            for parts in zip(nest, *others, strict=True)
        ]
        return type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)
    if isinstance(nest, dict):
        changed = copy.copy(nest)  # keeps what a subclass has besides its items
        for key in nest:
            parts = nest[key], *(o[key] for o in others)
            changed[key] = map_leaves(fn, *parts, tensors_only=tensors_only)
        return changed
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        result = copy.copy(nest)  # not replace(): it refuses fields with init=False
        for f in dataclasses.fields(nest):
            parts = tuple(getattr(part, f.name) for part in (nest, *others))
            value = map_leaves(fn, *parts, tensors_only=tensors_only)
            object.__setattr__(result, f.name, value)
        return result
    return nest if tensors_only else fn(nest, *others)


def pack(nest: State) -> list[Any]:
    """Return everything in the nest that is not a container, in order."""
    items: list[Any] = []
    map_leaves(items.append, nest, tensors_only=False)
    return items


def unpack(template: State, items: list[Any]) -> State:
    """Undo `pack`, given any nest of the same structure."""
    remaining = iter(items)
    return map_leaves(lambda _: next(remaining), template, tensors_only=False)


def with_gradients(nest: State, values: Iterable[Tensor]) -> State:
    """Replace the leaves that require a gradient by `values`, all others by zeros."""
    remaining = iter(values)
    return map_leaves(lambda x: next(remaining) if x.requires_grad else torch.zeros_like(x), nest)


def named_leaves(nest: State, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor leaf with its path.

    >>> [name for name, _ in named_leaves({"h": torch.zeros(1), "cells": [torch.zeros(1)]})]
    ['h', 'cells.0']
    """
    if isinstance(nest, Tensor):
        yield prefix or "state", nest
        return
    items: Any = ()
    if isinstance(nest, dict):
        items = nest.items()
    elif isinstance(nest, tuple | list):
        items = zip(getattr(nest, "_fields", range(len(nest))), nest, strict=True)
    elif dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        items = ((f.name, getattr(nest, f.name)) for f in dataclasses.fields(nest))
    for key, value in items:
        yield from named_leaves(value, f"{prefix}.{key}" if prefix else str(key))


def leaf_label(name: str) -> str:
    """Return how an error names a leaf of `named_leaves`; a nest of one tensor needs no name."""
    return "" if name == "state" else f" (leaf '{name}')"


def leaves(nest: State) -> list[Tensor]:
    """Return the tensor leaves of `nest`, in order."""
    if isinstance(nest, Tensor):
        return [nest]
    return [leaf for _, leaf in named_leaves(nest)]


def detach(state: State) -> State:
    """Detach the state from the graph that made it; values are shared, not copied."""
    return map_leaves(Tensor.detach, state)


def detached_copy(state: State) -> State:
    """Copy the state without its graph."""
    return map_leaves(lambda leaf: leaf.detach().clone(), state)


def as_real(nest: State) -> State:
    """View complex leaves as pairs of real numbers, in a last dimension of two."""
    return map_leaves(lambda x: torch.view_as_real(x.resolve_conj()) if x.is_complex() else x, nest)


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
    """Replace the rows for which the `(rows,)` mask is true by those of `initial`.

    No gradient flows back through a row that was reset.
    """

    def apply(dim: int, leaf: Tensor, start: Tensor) -> Tensor:
        # where() sends exact zeros back to the rows it did not take, even if they are NaN.
        # A state that autocast left in bfloat16 stays in bfloat16.
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


def rows_of(inputs: Nest) -> int:
    """Return the number of rows (the batch size) of time-first inputs."""
    return leaves(inputs)[0].shape[1]


def steps_of(inputs: Nest) -> int:
    """Return the number of time steps of time-first inputs."""
    return leaves(inputs)[0].shape[0]


def slice_steps(nest: Nest, start: int, stop: int | None) -> Nest:
    """Cut steps `start` to `stop` out of a time-first nest."""
    if isinstance(nest, Tensor):
        return nest[start:stop]
    return map_leaves(lambda leaf: leaf[start:stop], nest)


def swap_time_and_batch(nest: Nest) -> Nest:
    """Turn a time-first nest into a batch-first one, or back."""
    return map_leaves(lambda leaf: leaf.transpose(0, 1), nest)
