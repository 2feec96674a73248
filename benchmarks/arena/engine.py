"""One training loop for every method: same model, same optimiser, same data, only windows differ.

A window starts some steps before its losses. Cuts divide it; at a cut the gradient of the state may
be multiplied by a factor. That covers every comparator: no context is the detach loop, one cut of
factor 1 a fixed context, factors above 1 the randomised estimators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

State = Any


@dataclass(frozen=True)
class Plan:
    """The next window.

    Attributes:
        losses: steps that carry a loss.
        cuts: steps back from the first loss where the window is cut, ascending; the last is where
            it starts. None is no context.
        factors: what the gradient of the state is multiplied by at the start of the losses, at
            cuts[0], at cuts[1], ...; the one of the last cut is not used.
        inner: cuts between the losses, as (step, factor) from the first loss on.
        rate: factor on the learning rate of this update.
        share: what the mean loss of the window is multiplied by.
    """

    losses: int
    cuts: tuple[int, ...] = ()
    factors: tuple[float, ...] = ()
    inner: tuple[tuple[int, float], ...] = ()
    rate: float = 1.0
    share: float = 1.0


def map_state(fn: Any, state: State) -> State:
    """Apply a function to the tensors of a state."""
    if isinstance(state, tuple):
        return tuple(fn(x) for x in state)
    return None if state is None else fn(state)


def detached(state: State) -> State:
    """Return a state without its graph."""
    return map_state(torch.Tensor.detach, state)


def scaled(state: State, factor: float) -> State:
    """Return a state whose gradient is multiplied by a factor on the way back."""

    def alias(leaf: Tensor) -> Tensor:
        leaf = leaf.view_as(leaf)
        if leaf.requires_grad:
            leaf.register_hook(lambda g: g * factor)
        return leaf

    return state if factor == 1.0 else map_state(alias, state)


def parts_of(state: State) -> list[Tensor]:
    """Return the tensors of a state."""
    return list(state) if isinstance(state, tuple) else [state]


@dataclass
class Carried:
    """Detached states of the stream by step, as far back as a method may look."""

    reach: int
    states: dict[int, State] = field(default_factory=lambda: {0: None})

    def begin(self) -> None:
        """Start an epoch from the initial state."""
        self.states = {0: None}

    def put(self, step: int, state: State) -> None:
        """Note the state that enters a step, and forget what is too old."""
        self.states[step] = detached(state)
        oldest = max((s for s in self.states if s <= step - self.reach), default=0)
        self.states = {s: x for s, x in self.states.items() if s >= oldest}

    def start(self, step: int) -> int:
        """Return the latest known step that is at most `step`, or the earliest known."""
        return max((s for s in self.states if s <= step), default=min(self.states))


def run_window(task: Any, model: Any, carried: Carried, first: int, plan: Plan) -> Tensor:
    """Run one window forward; return its loss, ready for `backward`."""
    x, y = task.train
    stop = min(first + plan.losses, len(x))
    edges = [carried.start(max(first - c, 0)) for c in plan.cuts]  # descending
    factors = dict(zip([first, *edges], plan.factors, strict=False))
    points = sorted({first, *edges})
    state = carried.states[points[0]]
    for a, b in pairwise(points):
        _, state = model.core(x[a:b], state)
        state = scaled(state, factors.get(b, 1.0))
    inner = {first + s: f for s, f in plan.inner if first + s < stop}
    read = []
    marks = [first, *sorted(inner), stop]
    for a, b in pairwise(marks):
        features, state = model.core(x[a:b], scaled(state, inner.get(a, 1.0)))
        read.append(features)
    carried.put(stop, state)
    features = torch.cat(read) if len(read) > 1 else read[0]
    return task.loss(model.head(features), y[first:stop])


def run_levels(
    task: Any, model: Any, carried: Carried, first: int, losses: int, cuts: Sequence[int]
) -> list[list[Tensor | None]]:
    """Return what each level of a window adds to the gradient: one tensor or None per parameter."""
    x, y = task.train
    parameters = list(model.parameters())
    stop = min(first + losses, len(x))
    edges = sorted({carried.start(max(first - c, 0)) for c in cuts} | {first})
    passes = []
    state = carried.states[edges[0]]
    for a, b in pairwise([*edges, stop]):
        entering = map_state(lambda s: s.detach().requires_grad_(), state)
        features, state = model.core(x[a:b], entering)
        passes.append((entering, features, state))
    carried.put(stop, state)
    gradients: list[list[Tensor | None]] = []
    given: list[Tensor] | None = None
    for entering, features, leaving in reversed(passes):
        wanted = [] if entering is None else parts_of(entering)
        if given is None:
            outputs, received = [task.loss(model.head(features), y[first:stop])], None
        else:
            outputs, received = parts_of(leaving), given
        found = torch.autograd.grad(outputs, [*parameters, *wanted], received, allow_unused=True)
        gradients.append(list(found[: len(parameters)]))
        given = [
            torch.zeros_like(w) if g is None else g
            for w, g in zip(wanted, found[len(parameters) :], strict=True)
        ]
    return gradients
