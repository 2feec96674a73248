"""Run steps forward and backpropagate through them, with a bounded number in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from .._torch.number_formats import forget_casts, no_autocast
from .._torch.preserve_model import RandomState, random_state_of, restore_random_state
from ..data.nest import State, detach, leaves, map_leaves, with_gradients
from ..data.segment import Segment
from ..model.recurrent import Recurrent
from ..model.running import unroll

HELD_STEPS = 400  # the paper's longest window; about 300 MiB for an LSTM of 128 units, 64 rows


class Ran(Protocol):
    """Steps that were run."""

    @property
    def leaving(self) -> State:
        """The state after them."""


class Pass(Ran, Protocol):
    """Steps that were run and can be backpropagated through."""

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
            if torch.is_grad_enabled() and not any(x.requires_grad for x in leaves(step.leaving)):
                raise ValueError(
                    f"the state of {recurrent.name} carries no gradient: the model detaches it, "
                    "computes it under no_grad, or it is not floating point"
                )

    def backward(self, gradients: list[Tensor]) -> list[Tensor]:
        """See `Pass`."""
        wanted = [x for entering in self._entering for x in entering if x.requires_grad]
        pairs = zip(leaves(self.leaving), gradients, strict=True)
        outputs, given = zip(*((x, g) for x, g in pairs if x.requires_grad), strict=True)
        with no_autocast(outputs[0].device):
            found = torch.autograd.grad(
                outputs, wanted, given, allow_unused=True, materialize_grads=True
            )
        by_step = with_gradients(self._entering, found)
        return [torch.stack(steps) for steps in zip(*by_step, strict=True)]


def _alias(state: State) -> State:
    # Within its step, a new state may already be read (by a higher layer, say). Those paths use the
    # original, so the gradient of the alias counts only the paths from the next step on.
    return map_leaves(lambda x: x.view_as(x), state)


def as_variable(leaf: Tensor) -> Tensor:
    """Return a detached copy that requires a gradient, if it is of floating point."""
    return leaf.detach().clone().requires_grad_(leaf.is_floating_point())


R = TypeVar("R", bound=Ran)


class Replay(Generic[R]):
    """Run the parts of a segment forward in order, and return them from the last to the first.

    A part that is not held in memory runs again when its turn comes, from the same state and with
    the same random numbers. That costs at most one more forward pass.

    Args:
        recurrent: the model.
        parts: consecutive steps; there may be none.
        state: state entering the first part.
        run: runs a part from a state.
        hold: whether to hold every part; otherwise only the last one.

    Attributes:
        final: the detached state after the last part.
    """

    def __init__(
        self,
        recurrent: Recurrent,
        parts: Sequence[Segment],
        state: State,
        run: Callable[[Segment, State], R],
        *,
        hold: bool = False,
    ) -> None:
        self._module, self._run = recurrent.module, run
        self._kept: list[tuple[Segment, State, RandomState, R | None]] = []
        self.final = detach(state)
        for index, part in enumerate(parts):
            # A copy: the state may be a view, which would keep all that a part computed.
            copy, random = map_leaves(Tensor.clone, self.final), random_state_of(self._module)
            held = hold or index == len(parts) - 1
            forget_casts()
            with torch.set_grad_enabled(held):
                ran = run(part, self.final)
            self._kept.append((part, copy, random, ran if held else None))
            self.final = detach(ran.leaving)

    def pop(self) -> R:
        """Return the last part left; drop your reference before the next call to free its graph."""
        part, state, random, ran = self._kept.pop()
        if ran is None:
            restore_random_state(self._module, random)
            forget_casts()
            ran = self._run(part, state)
        return ran
