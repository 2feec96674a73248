"""The norm of one step's Jacobian, row by row, by power iteration."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from adaptive_tbptt.data import leaves, map_leaves
from adaptive_tbptt.model import Recurrent


def jacobian_norms(
    recurrent: Recurrent,
    inputs: Any,
    state: Any,
    *,
    iterations: int = 200,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> Tensor:
    """Return ||dh_t/dh_{t-1}|| for every row of one step, by power iteration on J^T J.

    J v comes from differentiating J^T u with respect to u; where a kernel can be differentiated
    only once, from central differences. Power iteration approaches the norm from below.

    Args:
        recurrent: the model.
        inputs: `(1, rows, ...)`.
        state: state entering that step.
        iterations: at most this many; arbitrary.
        tolerance: stop when no row's estimate grew by this fraction over the last ten iterations,
            and not before the thirtieth: a direction that stretches may take a while to emerge.
        seed: of the starting vectors.
    """
    with torch.enable_grad():
        rows = iter(recurrent.dims(inputs))  # a part without rows is no part of a row's state
        state = map_leaves(
            lambda x: x.detach().requires_grad_(next(rows) is not None and x.is_floating_point()),
            state,
        )
        _, after = recurrent.core(inputs, state)
        before = [x for x in leaves(state) if x.requires_grad]
        stepped = [x for x in leaves(after) if x.requires_grad]
        u = [torch.zeros_like(x, requires_grad=True) for x in stepped]
        pullback = torch.autograd.grad(
            stepped, before, u, create_graph=True, allow_unused=True, materialize_grads=True
        )
        generator = torch.Generator().manual_seed(seed)
        v: Any = map_leaves(
            lambda x: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x), state
        )
        history: list[Tensor] = []
        twice = True  # whether a second derivative is to be had, and right
        for _ in range(iterations):
            v = _normalise(recurrent, v)
            directions = [
                d for d, x in zip(leaves(v), leaves(state), strict=True) if x.requires_grad
            ]
            along = _pushed(pullback, u, directions) if twice else None
            if along is None:
                twice, along = False, _differences(recurrent, inputs, state, v, after)
            history.append(_row_norms(recurrent, _with_gradients(after, along)).detach())
            if len(history) >= 30 and bool((history[-1] <= history[-11] * (1 + tolerance)).all()):
                break
            back = _with_gradients(
                state,
                torch.autograd.grad(
                    stepped,
                    before,
                    along,
                    retain_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                ),
            )
            if twice and not _agree(_row_products(recurrent, v, back), history[-1] ** 2, stepped):
                twice, history = False, []
                continue
            v = back
    return history[-1]


def _pushed(
    pullback: tuple[Tensor, ...], u: list[Tensor], directions: list[Tensor]
) -> list[Tensor] | None:
    """Return J v, or None where J^T u cannot be differentiated with respect to u."""
    try:
        found = torch.autograd.grad(pullback, u, directions, retain_graph=True, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # marked as differentiable once, or nothing depends on the state
        return None
    return None if any(g is None for g in found) else list(found)


def _agree(ours: Tensor, theirs: Tensor, stepped: list[Tensor]) -> bool:
    """Whether <v, J^T J v> is |J v|^2: it is not where a kernel's second derivative is missing."""
    rtol = max(1e-2, 16 * _resolution(stepped))  # bfloat16 has but eight bits
    return torch.allclose(ours, theirs, rtol=rtol, atol=1e-6 * float(theirs.max()))


def _resolution(tensors: list[Tensor]) -> float:
    return max(torch.finfo(x.dtype).eps for x in tensors)


def _differences(recurrent: Recurrent, inputs: Any, state: Any, v: Any, after: Any) -> list[Tensor]:
    """Return J v from two more steps, for the leaves of `after` that carry a gradient."""
    width = _resolution([x for x in leaves(after) if x.requires_grad]) ** (1 / 3)
    dims = sum(part.shape[1] for part in recurrent.components(state).values())
    size = (_row_norms(recurrent, state).detach() / math.sqrt(dims)).clamp_min(1.0)
    step = _times(recurrent, v, width * size)

    def moved(sign: float) -> Any:
        shifted = map_leaves(lambda x, d: x + sign * d if x.is_floating_point() else x, state, step)
        with torch.no_grad():
            return recurrent.core(inputs, shifted)[1]

    slope = _times(recurrent, map_leaves(torch.sub, moved(1.0), moved(-1.0)), 0.5 / (width * size))
    carried = [x.requires_grad for x in leaves(after)]
    return [x for x, own in zip(leaves(slope), carried, strict=True) if own]


def _with_gradients(nest: Any, values: Iterable[Tensor]) -> Any:
    """Put `values` in place of the leaves that require a gradient, zeros in that of others."""
    remaining = iter(values)
    return map_leaves(lambda x: next(remaining) if x.requires_grad else torch.zeros_like(x), nest)


def _row_products(recurrent: Recurrent, a: Any, b: Any) -> Tensor:
    """Return inner products in float64, on the CPU: not every device has such numbers."""
    pairs = zip(recurrent.components(a).values(), recurrent.components(b).values(), strict=True)
    return torch.stack([(x.cpu().double() * y.cpu().double()).sum(dim=1) for x, y in pairs]).sum(
        dim=0
    )


def _row_norms(recurrent: Recurrent, state: Any) -> Tensor:
    return _row_products(recurrent, state, state).sqrt()


def _normalise(recurrent: Recurrent, state: Any) -> Any:
    norms = _row_norms(recurrent, state)
    return _times(recurrent, state, 1.0 / torch.where(norms > 0.0, norms, 1.0))


def _times(recurrent: Recurrent, state: Any, factors: Tensor) -> Any:
    """Multiply every row of a state by a number of its own."""
    dims = iter(recurrent.known_dims)

    def scale(leaf: Tensor) -> Tensor:
        dim = next(dims)
        if dim is None or not leaf.is_floating_point():
            return torch.zeros_like(leaf)
        return leaf * factors.to(leaf).view(-1, *[1] * (leaf.dim() - dim - 1))

    return map_leaves(scale, state)
