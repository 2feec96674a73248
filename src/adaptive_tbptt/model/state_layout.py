"""How a module lays out its state, found by running one step of one row and one step of two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .._torch.compiling import eager
from .._torch.number_formats import autocast_format, wide
from .._torch.preserve_model import preserve
from ..data.nest import (
    BatchDims,
    Nest,
    State,
    batch_dims,
    detach,
    leaves,
    map_leaves,
    pack,
    select_rows,
)

if TYPE_CHECKING:
    from .recurrent import Recurrent


class Layout(NamedTuple):
    """How a module lays out its state.

    Attributes:
        dims: the batch dimension of each leaf.
        start: one row of the state that None stands for, if that is zero; else None.
        example: a state of one row.
        flat: for each tensor that the module returns, whether time and batch, in its own order of
            the two, are flattened into one dimension. None if a tensor has neither form, so that
            pieces cannot be joined along time.
    """

    dims: BatchDims
    start: State
    example: State
    flat: list[bool] | None


def find_layout(recurrent: Recurrent, inputs: Nest) -> Layout:
    """Compare the states after one step of one row and of two; refuse dependent rows."""
    row = map_leaves(lambda leaf: leaf[:1, :1], inputs)
    pair = map_leaves(lambda leaf: torch.cat([leaf[:1, :1], leaf[:1, -1:]], dim=1), inputs)
    with preserve(recurrent.module, train=False), eager():
        with torch.enable_grad():
            returned, one = recurrent.core(row, None)
            zero = map_leaves(torch.zeros_like, one)
            same = recurrent.core(row, zero)[1]
            learnt = _reached(one) - _reached(same)
        with torch.no_grad():
            beside, two = recurrent.core(pair, None)
            square, _ = recurrent.core(map_leaves(lambda leaf: torch.cat([leaf, leaf]), pair), None)
    one, same = detach(one), detach(same)
    if not leaves(one):
        raise ValueError(
            f"{recurrent.name} returned a state without tensors: there is nothing to "
            "backpropagate through"
        )
    # A parameter that the state depends on only when started from None is a learnt start.
    learnt &= {id(p) for p in recurrent.module.parameters()}
    cast = autocast_format(recurrent.device)
    start = detach(zero) if not learnt and _close(same, one, cast) else None
    dims = _dims_of(recurrent.state_batch_dim, one, two)
    if all(dim is None for dim in dims):
        raise ValueError("no part of the state has a batch dimension: its rows are not independent")
    alone = select_rows(two, torch.zeros(1, dtype=torch.long), dims)
    if not _close(alone, one, cast):
        raise ValueError(
            "rows are not independent: a row's state changes with the rows beside it, so the "
            "gradient of one row's loss cannot be separated from that of the others"
        )
    return Layout(dims, start, one, _flat(recurrent.time_dim, cast, returned, beside, square))


def _flat(
    time: int, cast: torch.dtype | None, one: Any, beside: Any, square: Any
) -> list[bool] | None:
    """Compare what a step of one row returns with a step of two rows, and with two steps of two."""
    found = [leaves(nest) for nest in (one, beside, square)]
    if not found[0] or len({len(tensors) for tensors in found}) > 1:
        return None
    flat = []
    for tensors in zip(*found, strict=True):
        shapes = [tuple(x.shape) for x in tensors]
        rest = shapes[0][1:]
        if shapes == [(a, b, *rest[1:]) for a, b in ((1, 1), (2, 1) if time else (1, 2), (2, 2))]:
            flat.append(False)
        # Flattened in the other order, its first step would be elsewhere.
        elif shapes == [(n, *rest) for n in (1, 2, 4)] and _close(
            tensors[2].unflatten(0, (2, 2)).select(time, 0), tensors[1], cast
        ):
            flat.append(True)
        else:
            return None
    return flat


def _reached(state: State) -> set[int]:
    """Identify the leaves of the graph that a state depends on.

    Walks the graph, because a kernel may refuse a backward pass over a single step.
    """
    found = {id(x) for x in leaves(state) if x.requires_grad and x.grad_fn is None}
    waiting: list[Any] = [x.grad_fn for x in leaves(state)]
    seen = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            found |= {id(node.variable)} if hasattr(node, "variable") else set()
            waiting += [further for further, _ in node.next_functions]
    return found


def _dims_of(given: int | None, one: State, two: State) -> BatchDims:
    if given is None:
        return batch_dims(one, two)
    shapes = [tuple(x.shape) for x in leaves(one)]
    if any(len(shape) <= given for shape in shapes):
        raise ValueError(f"state_batch_dim={given} does not exist in a state of shapes {shapes}")
    return [given] * len(shapes)


def _close(a: State, b: State, cast: torch.dtype | None) -> bool:
    """Equal up to rounding: kernels may sum in another order for another batch size.

    Under autocast a float32 state may have only the precision of `cast`.
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
