"""Backpropagation to every state of a long window in bounded memory, one segment at a time.

The forward pass keeps the state that enters each segment and the random state there; the backward
pass runs each segment but the last again from them. That is one forward pass more, at most, and
what is held at once does not depend on the window.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._torch.number_formats import forget_casts
from .._torch.random_state import RandomState, random_state_of, restore_random_state
from ..data.nest import State, detach, leaves, map_leaves
from ..data.segment import Segment
from ..model.recurrent import Recurrent
from .parameter_lags import ParameterLags
from .parameter_pass import ParameterPass
from .passes import Pass, StepPass, fused_pass


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
