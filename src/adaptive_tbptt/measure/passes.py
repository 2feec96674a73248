"""Steps that were run forward and can be backpropagated through: to every state in between."""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn

from .._torch.number_formats import no_autocast
from ..data.nest import State, leaves, map_leaves, per_row, reset_rows, with_gradients
from ..data.stream import Segment
from ..model.recurrent import Recurrent
from ..model.running import unroll
from .fused_layer import layer_pass


class Pass(Protocol):
    """Some steps that were run, and can be backpropagated through.

    Attributes:
        leaving: the state after them.
    """

    leaving: State

    def backward(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return `(steps, *leaf)` per state leaf: gradients of the state that enters each step.

        Args:
            gradients: with respect to the leaves of `leaving`.
        """


class StepPass:
    """Steps of any module, one at a time, by autograd."""

    def __init__(self, recurrent: Recurrent, segment: Segment, state: State) -> None:
        self._entering: list[list[Tensor]] = []
        start = map_leaves(as_variable, state)
        for step in unroll(recurrent, segment.inputs, start, segment.resets, _alias):
            self._entering.append(leaves(step.entering))
            self.leaving = step.leaving
            _check_carries(recurrent, step.leaving)

    def backward(self, gradients: list[Tensor]) -> list[Tensor]:
        """See `Pass`."""
        wanted = [x for entering in self._entering for x in entering if x.requires_grad]
        pairs = zip(leaves(self.leaving), gradients, strict=True)
        outputs, given = zip(*((x, g) for x, g in pairs if x.requires_grad), strict=True)
        with no_autocast(outputs[0].device):
            found = iter(
                torch.autograd.grad(
                    outputs, wanted, given, allow_unused=True, materialize_grads=True
                )
            )
        by_step = [with_gradients(entering, found) for entering in self._entering]
        return [torch.stack(steps) for steps in zip(*by_step, strict=True)]


def _alias(state: State) -> State:
    # What a step made of its own new state (a higher layer, say) hangs on the original, so only
    # the paths from the next step on reach the alias.
    return map_leaves(lambda x: x.view_as(x), state)


class ResetPass:
    """Passes over the stretches between the starts of sequences, one after another.

    Args:
        recurrent: the model.
        parts: the stretches, in the order of time.
        masks: `(rows,)` for each, true where a row starts anew at its first step; None for none.
    """

    def __init__(self, recurrent: Recurrent, parts: list[Pass], masks: list[Tensor | None]) -> None:
        self._recurrent, self._parts, self._masks = recurrent, parts, masks
        self.leaving = parts[-1].leaving

    def backward(self, gradients: list[Tensor]) -> list[Tensor]:
        """See `Pass`."""
        found = []
        for part, mask in zip(reversed(self._parts), reversed(self._masks), strict=True):
            steps = part.backward(gradients)
            if mask is not None:  # nothing of the past reaches a row that starts anew
                for leaf, dim in zip(steps, self._recurrent.known_dims, strict=True):
                    if dim is not None:
                        leaf[0] *= per_row(~mask.to(leaf.device), leaf[0], dim)
            gradients = [leaf[0] for leaf in steps]
            found.append(steps)
        return [torch.cat(leaf[::-1]) for leaf in zip(*found, strict=True)]


def fused_pass(
    recurrent: Recurrent, layer: nn.RNNBase, segment: Segment, state: State
) -> Pass | None:
    """Take the fast path between resets; return None where an initial state is learned."""
    resets = segment.resets
    if resets is None or not resets.any():
        return layer_pass(recurrent, layer, segment.inputs, state)
    initial = recurrent.initial_state(segment.inputs)
    if any(leaf.requires_grad for leaf in leaves(initial)):
        return None  # a learned initial state has a gradient of its own
    starts = torch.nonzero(resets.any(dim=1)).flatten().tolist()
    parts: list[Pass] = []
    masks: list[Tensor | None] = []
    for start, stop in pairwise(sorted({0, *starts, segment.steps})):
        mask = resets[start] if start in starts else None
        if mask is not None:
            dims = recurrent.dims(segment.inputs)
            state = reset_rows(state, mask, initial, dims)
        part = layer_pass(recurrent, layer, segment.between(start, stop).inputs, state)
        parts.append(part)
        masks.append(mask)
        state = part.leaving
    return ResetPass(recurrent, parts, masks)


def as_variable(leaf: Tensor) -> Tensor:
    """Return a detached copy to differentiate for; integers stay constants."""
    return leaf.detach().clone().requires_grad_(leaf.is_floating_point())


def _check_carries(recurrent: Recurrent, state: State) -> None:
    """Refuse a state that no gradient flows through."""
    if torch.is_grad_enabled() and not any(x.requires_grad for x in leaves(state)):
        raise ValueError(
            f"the state of {recurrent.name} carries no gradient: it is detached inside, made under "
            "no_grad, or not of floating point"
        )
