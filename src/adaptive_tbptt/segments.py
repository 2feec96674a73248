"""Backpropagation to every state of a long window in bounded memory, one segment at a time.

The forward pass keeps the state that enters each segment and the random state there; the backward
pass runs each segment but the last again from them. That is one forward pass more, at most, and
what is held at once does not depend on the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from .fused import is_fused, layer_pass
from .model import Recurrent
from .parameter_lags import ParameterLags
from .parameter_pass import ParameterPass, as_variable, check_carries
from .precision import forget_casts, no_autocast
from .state import State, detach, leaves, map_leaves, per_row, reset_rows, with_gradients
from .stream import Segment
from .undisturbed import RandomState, random_state_of, restore_random_state
from .unroll import unroll


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
            check_carries(recurrent, step.leaving)

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
    recurrent: Recurrent, segment: Segment, state: State, lags: ParameterLags | None
) -> Pass | None:
    """Take the fast path between the starts of sequences; return None where it does not apply."""
    resets = segment.resets
    if resets is None or not resets.any():
        return layer_pass(recurrent, segment.inputs, state, lags)
    if not is_fused(recurrent, segment.inputs, state):  # on all steps: a stretch may be of one
        return None
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
        part = layer_pass(recurrent, segment.between(start, stop).inputs, state, lags)
        if part is None:
            return None
        parts.append(part)
        masks.append(mask)
        state = part.leaving
    return ResetPass(recurrent, parts, masks)


class _Shelf:
    """Room for copies of a nest, made at once.

    Small tensors strewn between the large ones of the segments would keep the allocator from
    using that memory again: a window of 10,000 steps then takes up to five times as much.
    """

    def __init__(self, nest: State, copies: int) -> None:
        self._free = iter([[x.new_empty(x.shape) for x in leaves(nest)] for _ in range(copies)])

    def put(self, nest: State) -> State:
        """Return a copy."""
        slots = iter(next(self._free))

        def copy(x: Tensor) -> Tensor:
            slot = next(slots)
            # Under autocast the first state may be of another format than those that follow.
            return slot.copy_(x) if slot.dtype == x.dtype else x.clone()

        return map_leaves(copy, nest)


class Segments:
    """The steps of a window, run forward.

    Args:
        recurrent: the model.
        window: the steps; there may be none.
        state: state entering the first step.
        length: steps that are held at once.
        fused: whether to take the fast path where it applies.
        lags: where the contributions of the steps to the parameters' gradient are to go.

    Attributes:
        final: the detached state after the last step.
    """

    def __init__(
        self,
        recurrent: Recurrent,
        window: Segment,
        state: State,
        *,
        length: int,
        fused: bool,
        lags: ParameterLags | None = None,
    ) -> None:
        self._recurrent, self._window, self._lags = recurrent, window, lags
        self._length, self._fused = length, fused
        self._starts = list(range(0, window.steps, length))
        self._kept: list[tuple[State, RandomState]] = []
        self._newest: Pass | None = None
        self.final = detach(state)
        shelf = _Shelf((self.final, random_state_of(recurrent.module)), len(self._starts))
        for start in self._starts:
            self._kept.append(shelf.put((self.final, random_state_of(recurrent.module))))
            last = start == self._starts[-1]
            with torch.set_grad_enabled(last):
                passed = self._run(start, self.final)
            self._newest = passed if last else None
            self.final = detach(passed.leaving)

    def backward(self, gradients: list[Tensor]) -> Iterator[list[Tensor]]:
        """Yield what `Pass.backward` returns for each segment, the last one first.

        Args:
            gradients: with respect to `final`, one per leaf.
        """
        for start, (state, random) in zip(
            reversed(self._starts), reversed(self._kept), strict=True
        ):
            passed, self._newest = self._newest, None
            if passed is None:
                restore_random_state(self._recurrent.module, random)
                passed = self._run(start, state)
            found = passed.backward(gradients)
            gradients = [g[0] for g in found]
            yield found

    def _run(self, start: int, state: State) -> Pass:
        forget_casts()
        segment = self._window.between(start, min(start + self._length, self._window.steps))
        lags = self._lags
        if self._fused and (lags is None or lags.affine):
            passed = fused_pass(self._recurrent, segment, state, lags)
            if passed is not None:
                return passed
        if lags is not None:
            return ParameterPass(self._recurrent, segment, state, lags)
        return StepPass(self._recurrent, segment, state)
