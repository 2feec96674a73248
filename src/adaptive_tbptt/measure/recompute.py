"""Backpropagation to every state of many steps in bounded memory, one segment at a time.

The forward pass keeps the state that enters each segment and the random state there; the backward
pass runs each segment but the last again from them. That is one forward pass more, at most, and
what is held at once does not depend on the number of steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._torch.number_formats import forget_casts
from .._torch.preserve_model import RandomState, random_state_of, restore_random_state
from ..data.nest import State, detach, map_leaves
from ..data.stream import Segment
from ..model.recurrent import Recurrent
from .passes import Pass
from .plan import ProbePlan


class Segments:
    """Steps run forward, to be backpropagated through segment by segment.

    Args:
        recurrent: the model.
        steps: the steps; there may be none.
        state: state entering the first step.
        plan: how a segment is run.
        length: steps that are held at once.

    Attributes:
        final: the detached state after the last step.
    """

    def __init__(
        self, recurrent: Recurrent, steps: Segment, state: State, plan: ProbePlan, length: int
    ) -> None:
        self._recurrent, self._steps, self._plan, self._length = recurrent, steps, plan, length
        self._starts = list(range(0, steps.steps, length))
        self._kept: list[tuple[State, RandomState]] = []
        self._newest: Pass | None = None
        self.final = detach(state)
        for start in self._starts:
            # A copy: a state may be a view into all that a segment computed.
            kept = map_leaves(Tensor.clone, self.final), random_state_of(recurrent.module)
            self._kept.append(kept)
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
        segment = self._steps.between(start, min(start + self._length, self._steps.steps))
        return self._plan.run(self._recurrent, segment, state)
