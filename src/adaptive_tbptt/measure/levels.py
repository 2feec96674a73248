"""The gradient by level: what each stretch of context adds to the gradient of a window.

A window carries K2 losses after a context of c_J steps. The context is cut at 0 = c_0 < c_1 < ...
< c_J. Every part starts from a leaf copy of the state that the part before it left. The backward
pass goes part by part:

    Delta_0 = the gradient of the losses with respect to the parameters, without any context
    Delta_j = what the steps between contexts c_{j-1} and c_j add

Delta_0 + ... + Delta_j is exactly the gradient of the window with context c_j. One forward and one
backward pass over all steps yield every level, for any module with state in and state out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch.number_formats import autocast_format, no_autocast
from .._torch.preserve_model import random_state_of, restore_random_state
from ..data.nest import State, leaves, map_leaves
from ..data.segment import Segment
from ..model.objective import Objective
from ..model.running import Piece, run_pieces
from .passes import HELD_STEPS, Replay, as_variable

FLOAT16_SCALE = 2.0**10  # arbitrary: lifts small gradients over float16's floor, far from its top


@dataclass(frozen=True)
class LevelGradients:
    """What each level adds to the gradient of one window.

    Attributes:
        contexts: 0 = c_0 < c_1 < ... < c_J.
        gradients: for each level one tensor per parameter; None if no gradient reaches it.
        loss: the mean loss of the window, detached.
        count: the number of losses in that mean.
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
    """Return contexts as a tuple; refuse those that do not ascend from 0."""
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
        parameters: those to differentiate for.
        held_steps: a longer segment runs forward twice, so that memory holds one part at a time.
    """
    contexts = check_contexts(contexts)
    lags = contexts[-1]
    if segment.steps <= lags:
        raise ValueError(
            f"a segment of {segment.steps} steps leaves no loss after {lags} steps of context"
        )
    recurrent = objective.recurrent

    def run(part: Segment, state: State) -> _Part:
        entering = map_leaves(as_variable, state)
        pieces = list(run_pieces(recurrent, part, entering))
        return _Part(entering, pieces, pieces[-1].state)

    edges = [*(lags - c for c in reversed(contexts)), segment.steps]
    parts = [segment.between(a, b) for a, b in pairwise(edges)]
    replay = Replay(recurrent, parts, state, run, hold=segment.steps <= held_steps)
    scale = _loss_scale(objective, state)
    gradients: list[list[Tensor | None]] = []
    given: list[Tensor | None] = []
    for level in range(len(contexts)):
        part = replay.pop()
        outputs = leaves(part.leaving)
        if level == 0:
            loss, count = _loss(objective, part, parts[-1])
            random = random_state_of(recurrent.module)
            outputs, given = [loss * scale], [torch.ones_like(loss)]
        own, given = _differentiate(outputs, given, parameters, leaves(part.entering))
        del part, outputs  # free the graph before the next part runs
        if level == 0:
            reached = any(g is not None and bool(g.any()) for g in given)
        if scale != 1.0:
            own = [None if g is None else g.to(_wider(g)) / scale for g in own]
        gradients.append(own)
    # A part that ran again has rewound the random state. Without this, the next window would draw
    # the same dropout, and windows would not be independent.
    restore_random_state(recurrent.module, random)
    return LevelGradients(contexts, gradients, loss.detach(), count, reached)


class _Part(NamedTuple):
    """A part of the window with its graph; `entering` is a leaf copy of the state."""

    entering: State
    pieces: list[Piece]
    leaving: State


def _loss(objective: Objective, part: _Part, segment: Segment) -> tuple[Tensor, float]:
    """Return the mean loss of a part, and the number of losses in that mean."""
    count = objective.count_losses(segment.targets)
    if count > 0:
        return objective.loss_of_pieces(part.pieces, segment.targets), count
    held = [leaf.sum() for leaf in leaves(part.leaving) if leaf.requires_grad]
    zero = torch.stack(held).sum() * 0 if held else torch.zeros((), requires_grad=True)
    return zero, 0.0


def _differentiate(
    outputs: Sequence[Tensor],
    given: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
    entering: Sequence[Tensor],
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the gradients of the parameters and of the leaves of the state that entered.

    Args:
        outputs: what to differentiate.
        given: gradients with respect to the outputs.
        parameters: of the model.
        entering: the leaves; integer leaves have no gradient.
    """
    pairs = [
        (x, g) for x, g in zip(outputs, given, strict=True) if g is not None and x.requires_grad
    ]
    if not pairs:
        return [None] * len(parameters), [None] * len(entering)
    wanted = [*parameters, *(x for x in entering if x.requires_grad)]
    with no_autocast(pairs[0][0].device):
        found = iter(
            torch.autograd.grad(
                [x for x, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True
            )
        )
    own: list[Tensor | None] = [next(found) for _ in parameters]
    return own, [next(found) if x.requires_grad else None for x in entering]


def _loss_scale(objective: Objective, state: State) -> float:
    """Return the factor on the loss: above 1 if gradients pass through float16."""
    device = objective.recurrent.device
    formats = {x.dtype for x in leaves(state)} | {autocast_format(device)}
    return FLOAT16_SCALE if torch.float16 in formats else 1.0


def _wider(gradient: Tensor) -> torch.dtype:
    """Return a format that holds the unscaled gradient."""
    return torch.float32 if gradient.dtype == torch.float16 else gradient.dtype
