"""The gradient by level: what each stretch of context adds to the gradient of a window.

A window carries K2 losses after a context of c_J steps. The context is cut at 0 = c_0 < c_1 < ...
< c_J, every part starts from a leaf copy of the state that the part before it left, and the
backward pass goes part by part:

    Delta_0 = the gradient of the losses with respect to the parameters, without any context
    Delta_j = what the steps between contexts c_{j-1} and c_j add

Delta_0 + ... + Delta_j is exactly the gradient of the window with context c_j. One forward and one
backward pass over all steps yield every level, for any module with state in and state out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .._torch.number_formats import autocast_format, forget_casts, no_autocast
from .._torch.preserve_model import RandomState, random_state_of, restore_random_state
from ..data.nest import State, detach, leaves, map_leaves
from ..data.stream import Segment
from ..model.objective import Objective
from ..model.running import Piece, run_pieces
from .passes import as_variable
from .plan import HELD_STEPS

FLOAT16_SCALE = 2.0**10  # arbitrary: lifts small gradients over float16's floor, far from its top


@dataclass(frozen=True)
class LevelGradients:
    """What each level adds to the gradient of one window.

    Attributes:
        contexts: 0 = c_0 < c_1 < ... < c_J.
        gradients: for each level one tensor per parameter; None where it is not reached.
        loss: the mean loss of the window, detached.
        count: how many losses that is the mean of.
        reached: whether any gradient reached the state that entered the first loss.
    """

    contexts: tuple[int, ...]
    gradients: list[list[Tensor | None]]
    loss: Tensor
    count: float
    reached: bool

    def up_to(self, level: int) -> list[Tensor | None]:
        """Return the gradient of the window with context `contexts[level]`."""
        total: list[Tensor | None] = list(self.gradients[0])
        for gradient in self.gradients[1 : level + 1]:
            for i, (a, b) in enumerate(zip(total, gradient, strict=True)):
                total[i] = b if a is None else a if b is None else a + b
        return total


def check_contexts(contexts: Sequence[int]) -> tuple[int, ...]:
    """Return contexts that ascend from 0, or refuse."""
    found = tuple(int(c) for c in contexts)
    if not found or found[0] != 0 or any(b <= a for a, b in pairwise(found)):
        raise ValueError(f"contexts must ascend from 0, such as (0, 1, 2, 4), got {found}")
    return found


def level_gradients(
    objective: Objective,
    segment: Segment,
    state: State,
    contexts: Sequence[int],
    parameters: Sequence[Tensor],
    *,
    held_steps: int = HELD_STEPS,
) -> LevelGradients:
    """Backpropagate the losses of a window level by level.

    Args:
        objective: model and loss.
        segment: c_J steps of context, then the steps that carry losses, time first.
        state: state entering the segment; None is the initial state.
        contexts: 0 = c_0 < c_1 < ... < c_J.
        parameters: what to differentiate for.
        held_steps: a longer segment is run forward twice, so that only one part is held at once.
    """
    contexts = check_contexts(contexts)
    lags = contexts[-1]
    if segment.steps <= lags:
        raise ValueError(f"{segment.steps} steps leave no loss after a context of {lags}")
    edges = [lags - c for c in reversed(contexts)]
    parts = [segment.between(a, b) for a, b in pairwise([*edges, segment.steps])]
    passes = _forward(objective, parts, state, again=segment.steps > held_steps)
    gradients: list[list[Tensor | None]] = []
    given: list[Tensor | None] = []
    reached = False
    scale = _loss_scale(objective, state)
    for index, one in enumerate(reversed(passes)):
        one.run(objective)
        outputs: list[Tensor]
        received: list[Tensor | None]
        if index == 0:
            loss, count = one.loss(objective)
            random = random_state_of(objective.recurrent.module)
            outputs, received = [loss * scale], [None]
        else:
            pairs = zip(leaves(one.leaving), given, strict=True)
            kept = [(x, g) for x, g in pairs if g is not None and x.requires_grad]
            outputs, received = [x for x, _ in kept], [g for _, g in kept]
        found = _differentiate(outputs, received, one, parameters)
        one.release()
        own, given = found
        if scale != 1.0:
            own = [None if g is None else g.to(_wider(g)) / scale for g in own]
        gradients.append(own)
        reached = reached or (index == 0 and any(g is not None and bool(g.any()) for g in given))
    # Where parts ran again their random numbers would follow once more: windows of one measurement
    # would share their dropout and not be independent.
    restore_random_state(objective.recurrent.module, random)
    return LevelGradients(contexts, gradients, loss.detach(), count, reached)


class _Pass:
    """A part of the window: where it starts, and its graph while that is held."""

    def __init__(self, part: Segment, state: State, random: RandomState | None) -> None:
        self._part, self._state, self._random = part, state, random
        self._pieces: list[Piece] = []
        self.entering: State = None
        self.leaving: State = None

    def run(self, objective: Objective) -> None:
        """Run forward with a graph, unless that was done."""
        if self._pieces:
            return
        recurrent = objective.recurrent
        if self._random is not None:  # the same dropout as the first time
            restore_random_state(recurrent.module, self._random)
        forget_casts()
        self.entering = None if self._state is None else map_leaves(as_variable, self._state)
        self._pieces = list(run_pieces(recurrent, self._part, self.entering))
        self.leaving = self._pieces[-1].state

    def loss(self, objective: Objective) -> tuple[Tensor, float]:
        """Return the mean loss of the part and how many losses that is the mean of."""
        count = objective.count_losses(self._part.targets)
        if count > 0:
            return objective.loss_of_pieces(self._pieces, self._part.targets), count
        held = [leaf.sum() for leaf in leaves(self.leaving) if leaf.requires_grad]
        zero = torch.stack(held).sum() * 0 if held else torch.zeros((), requires_grad=True)
        return zero, 0.0

    def release(self) -> None:
        """Let go of the graph."""
        self._pieces, self.leaving = [], None


def _forward(
    objective: Objective, parts: list[Segment], state: State, *, again: bool
) -> list[_Pass]:
    """Run the parts in order; where they are to be run again, hold only what that needs."""
    recurrent, passes = objective.recurrent, []
    for index, part in enumerate(parts):
        newest = index == len(parts) - 1
        random = random_state_of(recurrent.module) if again and not newest else None
        one = _Pass(part, detach(state), random)
        passes.append(one)
        if not again or newest:
            one.run(objective)
            state = detach(one.leaving)
            continue
        with torch.no_grad():
            for piece in run_pieces(recurrent, part, one._state):
                state = detach(piece.state)
    return passes


def _differentiate(
    outputs: list[Tensor], received: list[Tensor | None], one: _Pass, parameters: Sequence[Tensor]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the gradients of the parameters and of the state that entered a part."""
    entering = leaves(one.entering)
    wanted = [x for x in entering if x.requires_grad]
    outputs = [x for x in outputs if x.requires_grad]
    if not outputs:
        return [None] * len(parameters), [None] * len(entering)
    with no_autocast(outputs[0].device):
        found = iter(
            torch.autograd.grad(outputs, [*parameters, *wanted], received, allow_unused=True)
        )
    own: list[Tensor | None] = [next(found) for _ in parameters]
    return own, [next(found) if x.requires_grad else None for x in entering]


def _loss_scale(objective: Objective, state: State) -> float:
    """Return what the loss is multiplied by where gradients pass through float16."""
    device = objective.recurrent.device
    formats = {x.dtype for x in leaves(state)} | {autocast_format(device)}
    return FLOAT16_SCALE if torch.float16 in formats else 1.0


def _wider(gradient: Tensor) -> torch.dtype:
    """Return a format that holds a gradient without its scale."""
    return torch.float32 if gradient.dtype == torch.float16 else gradient.dtype
