"""Recurrent state as any nest of tensors: tuple, list, dict, dataclass, or one tensor.

Everything else of the library sees a state only through the functions here. Leaves that are not
tensors (a step counter, a string, None) pass through untouched.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

State = Any


"""A nest of tensors. PyTorch's own modules use a tensor (RNN, GRU) or a pair (LSTM)."""


def map_leaves(fn: Callable[..., Any], nest: State, *others: State) -> State:
    """Apply `fn` to corresponding tensor leaves of nests of equal structure.

    >>> map_leaves(lambda a, b: a + b, (torch.ones(1), None), (torch.ones(1), None))
    (tensor([2.]), None)
    """
    return _map(lambda x, *rest: fn(x, *rest) if isinstance(x, Tensor) else x, nest, *others)


def _map(fn: Callable[..., Any], nest: State, *others: State) -> State:
    """Apply `fn` to everything that is not a container."""
    if isinstance(nest, Tensor):  # first, because most of a training loop's calls end here
        return fn(nest, *others)
    if isinstance(nest, dict):
        changed = copy.copy(nest)  # keeps what a subclass has besides its items
        for key in nest:
            changed[key] = _map(fn, nest[key], *(o[key] for o in others))
        return changed
    if isinstance(nest, tuple | list):
        items = [_map(fn, *parts) for parts in zip(nest, *others, strict=True)]
        return type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        result = copy.copy(nest)  # not replace(): it refuses fields with init=False
        for f in dataclasses.fields(nest):
            value = _map(fn, getattr(nest, f.name), *(getattr(o, f.name) for o in others))
            object.__setattr__(result, f.name, value)
        return result
    return fn(nest, *others)


def pack(nest: State) -> list[Any]:
    """Return everything in the nest that is not a container, in order."""
    items: list[Any] = []
    _map(items.append, nest)
    return items


def unpack(template: State, items: list[Any]) -> State:
    """Undo `pack`, given any nest of the same structure."""
    remaining = iter(items)
    return _map(lambda _: next(remaining), template)


def with_gradients(nest: State, values: Iterable[Tensor]) -> State:
    """Put `values` in place of the leaves that require a gradient, zeros in that of others."""
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
    elif hasattr(nest, "_fields"):
        items = zip(nest._fields, nest, strict=True)
    elif isinstance(nest, tuple | list):
        items = enumerate(nest)
    elif dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        items = ((f.name, getattr(nest, f.name)) for f in dataclasses.fields(nest))
    for key, value in items:
        yield from named_leaves(value, f"{prefix}.{key}" if prefix else str(key))


def leaves(nest: State) -> list[Tensor]:
    """Return the tensor leaves of `nest`, in order."""
    return [leaf for _, leaf in named_leaves(nest)]


def detach(state: State) -> State:
    """Cut the state from the graph that made it; values are shared, not copied."""
    return map_leaves(Tensor.detach, state)


def as_real(nest: State) -> State:
    """View complex leaves as pairs of real numbers, in a last dimension of two."""
    return map_leaves(lambda x: torch.view_as_real(x.resolve_conj()) if x.is_complex() else x, nest)


Nest = Any
