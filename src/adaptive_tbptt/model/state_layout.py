"""How a module lays out its state, found by running one step of one row and one step of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch.compiling import eager, plain
from .._torch.number_formats import autocast_format, wide
from .._torch.preserve_model import device_of, preserve
from ..data.nest import BatchDims, State, batch_dims, detach, leaves, map_leaves, pack, select_rows

Core = Callable[[Any, State], tuple[Any, State]]


class Layout(NamedTuple):
    """How a module lays out its state.

    Attributes:
        dims: the batch dimension of each leaf.
        start: one row of the state that None stands for; None where that is not zero.
        example: a state of one row.
    """

    dims: BatchDims
    start: State
    example: State


def find_layout(
    module: nn.Module, core: Core, inputs: Any, state_batch_dim: int | None = None
) -> Layout:
    """Compare the states that one row and two leave behind; refuse rows that are not independent.

    Args:
        module: the user's module.
        core: runs it over time-first inputs: `core(inputs, state) -> (features, state)`.
        inputs: time first, of which the first step is used.
        state_batch_dim: the batch dimension of every leaf, where the user named it.
    """
    row = map_leaves(lambda leaf: leaf[:1, :1], inputs)
    pair = map_leaves(lambda leaf: torch.cat([leaf[:1, :1], leaf[:1, -1:]], dim=1), inputs)
    cast = autocast_format(device_of(module))
    with preserve(module, train=False), eager():
        with torch.enable_grad():
            one = core(row, None)[1]
            zero = map_leaves(torch.zeros_like, one)
            same = core(row, zero)[1]
            learnt = _reached(module, one) - _reached(module, same)
        one, same = detach(one), detach(same)
        with torch.no_grad():
            two = core(pair, None)[1]
        if not leaves(one):
            raise ValueError(
                f"{type(plain(module)).__name__} returned a state without tensors: "
                "there is nothing to backpropagate through"
            )
    start = detach(zero) if not learnt and _close(same, one, cast) else None
    dims = _dims_of(state_batch_dim, one, two)
    if all(dim is None for dim in dims):
        raise ValueError("no part of the state has a batch dimension: its rows are not independent")
    alone = select_rows(two, torch.zeros(1, dtype=torch.long), dims)
    if not _close(alone, one, cast):
        raise ValueError(
            "rows are not independent: a row's state changes with the rows beside it, so "
            "the gradient of one loss cannot be told from that of the others"
        )
    return Layout(dims, start, one)


def _reached(module: nn.Module, state: State) -> set[int]:
    """Identify the parameters that a state depends on: one that only its start does was learnt.

    The graph says so; no backward pass is run, which a kernel may refuse for a single step.
    """
    found = {id(x) for x in leaves(state) if x.requires_grad and x.grad_fn is None}
    waiting: list[Any] = [x.grad_fn for x in leaves(state)]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [further for further, _ in node.next_functions]
    return found & {id(p) for p in module.parameters()}


def _dims_of(given: int | None, one: State, two: State) -> BatchDims:
    if given is None:
        return batch_dims(one, two)
    shapes = [tuple(x.shape) for x in leaves(one)]
    if any(len(shape) <= given for shape in shapes):
        raise ValueError(f"state_batch_dim={given} does not exist in a state of shapes {shapes}")
    return [given] * len(shapes)


def _close(a: State, b: State, cast: torch.dtype | None) -> bool:
    """Equal up to rounding: kernels may sum in another order for another batch size.

    Under autocast a state in float32 may be no better than `cast`.
    """

    def close(x: Any, y: Any) -> bool:
        if not isinstance(x, Tensor):
            return bool(x == y)
        formats = {x.dtype, y.dtype, cast or x.dtype}
        eps = max((torch.finfo(f).eps for f in formats if f.is_floating_point), default=0.0)
        rtol, atol = (1e-3, 1e-5) if eps < 1e-4 else (4 * eps, eps)
        return x.shape == y.shape and torch.allclose(
            wide(x), wide(y), rtol=rtol, atol=atol, equal_nan=True
        )

    return all(close(x, y) for x, y in zip(pack(a), pack(b), strict=True))
