"""The bias of a training window's gradient by plain autograd, on nearly every window of the data.

Nothing of the library is used here. For every context the model runs from the true state at the
start of the window, detached, and the loss of the last K2 steps is backpropagated in one call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .models import Case

Nest = Any


def tree(fn: Any, nest: Nest, *others: Nest) -> Nest:
    """Map over tensors in tuples and dicts."""
    if isinstance(nest, dict):
        return {k: tree(fn, v, *(o[k] for o in others)) for k, v in nest.items()}
    if isinstance(nest, tuple):
        return tuple(tree(fn, *parts) for parts in zip(nest, *others, strict=True))
    return nest if nest is None else fn(nest, *others)


def reset(state: Nest, mask: Tensor) -> Nest:
    """Return masked rows to zero; rows are the dimension that has as many entries as the mask."""

    def zero(leaf: Tensor) -> Tensor:
        dim = 1 if leaf.dim() == 3 and leaf.shape[0] == 1 else 0
        shape = [1] * leaf.dim()
        shape[dim] = -1
        return torch.where(mask.view(shape), torch.zeros_like(leaf), leaf)

    return tree(zero, state)


def run(model: Any, inputs: Nest, resets: Tensor | None, state: Nest) -> tuple[list[Any], Nest]:
    """Run some steps, cut where rows start anew; return outputs piece by piece, and the state."""
    steps = (inputs["weather"] if isinstance(inputs, dict) else inputs).shape[0]
    cuts = [0, steps]
    if resets is not None:
        cuts = sorted({0, steps, *torch.nonzero(resets.any(1)).flatten().tolist()})
    outputs = []
    for a, b in pairwise(cuts):
        if resets is not None and state is not None:
            state = reset(state, resets[a])
        out, state = model(tree(lambda x: x[a:b], inputs), state)  # noqa: B023
        outputs.append(out)
    return outputs, state


def true_bias(
    case: Case, model: Any, data: Any, contexts: Sequence[int], burn_in: int, windows: int
) -> tuple[list[float], list[float]]:
    """Return the relative bias at every context but the longest, and its standard error.

    Args:
        case: losses per window, and whether windows may be joined as rows.
        model: at its parameters, in the mode that was diagnosed.
        data: `(inputs, targets, resets)`.
        contexts: ascending from 0; the longest is the reference.
        burn_in: steps before the longest context that warm the state up from zero.
        windows: of every row, evenly spread over the data.
    """
    inputs, targets, resets = data
    steps = next(iter(targets.values())).shape[0] if isinstance(targets, dict) else len(targets)
    span = burn_in + contexts[-1] + case.losses
    starts = torch.linspace(0, steps - span, windows).round().long().tolist()
    batch = 12 if case.mean else 1
    groups = [starts[i::16] for i in range(16)]
    means: list[list[Tensor]] = []
    for group in groups:
        total: list[Any] = [0.0] * len(contexts)
        for i in range(0, len(group), batch):
            part = group[i : i + batch]
            joined = [
                None if nest is None else tree(lambda *p: torch.cat(p, 1), *(
                    tree(lambda x: x[s : s + span], nest) for s in part))  # noqa: B023
                for nest in (inputs, targets, resets)
            ]  # fmt: skip
            for j, c in enumerate(contexts):
                total[j] = total[j] + len(part) * _gradient(case, model, joined, c, span)
        means.append([t / len(group) for t in total])
    cut = [[whole - g for g in gradients] for *gradients, whole in means]
    whole = [gradients[-1] for gradients in means]
    return _ratios(cut, whole)


def _gradient(case: Case, model: Any, data: list[Any], context: int, span: int) -> Tensor:
    inputs, targets, resets = data
    first = span - case.losses - context

    def part(nest: Nest, a: int, b: int) -> Nest:
        return None if nest is None else tree(lambda x: x[a:b], nest)

    with torch.no_grad():
        _, state = run(model, part(inputs, 0, first), part(resets, 0, first), None)
    middle = span - case.losses
    if context:
        _, state = run(model, part(inputs, first, middle), part(resets, first, middle), state)
    outputs, _ = run(model, part(inputs, middle, span), part(resets, middle, span), state)
    joined = outputs[0]
    if len(outputs) > 1:
        joined = tree(lambda *p: torch.cat(p), *outputs)
    loss = case.loss(joined, part(targets, middle, span))
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    pairs = zip(found, model.parameters(), strict=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs]
    ).double()


def _ratios(cut: list[list[Tensor]], whole: list[Tensor]) -> tuple[list[float], list[float]]:
    """Return ||E cut|| / ||E whole|| from group means, products of a group with itself left out."""
    n = len(whole)

    def square(vectors: list[Tensor], left: int | None = None) -> float:
        kept = [v for i, v in enumerate(vectors) if i != left]
        total = torch.stack(kept).sum(0)
        own = sum(float(v @ v) for v in kept)
        return (float(total @ total) - own) / (len(kept) * (len(kept) - 1))

    biases, errors = [], []
    for j in range(len(cut[0])):
        vectors = [c[j] for c in cut]
        ratio = max(square(vectors), 0.0) / square(whole)
        without = torch.tensor([square(vectors, i) / square(whole, i) for i in range(n)])
        error = math.sqrt((n - 1) * float(without.var(correction=0)))
        biases.append(math.sqrt(ratio))
        errors.append(error / (2 * max(math.sqrt(ratio), 1e-9)))
    return biases, errors
