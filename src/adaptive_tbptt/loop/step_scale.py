"""The step size of Algorithm 1: gamma * sqrt(K), without ever overwriting gamma."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from torch.optim import Optimizer

Rule = Literal["sqrt", "linear", "none"]


_FACTORS: dict[str, Callable[[int], float]] = {
    "sqrt": math.sqrt,
    "linear": float,
    "none": lambda k: 1.0,
}


class StepScale:
    """Multiply the learning rate by sqrt(k), by k, or by 1, during `optimizer.step()` only.

    The rate is scaled in a hook before the step and put back in one after it, so schedulers,
    loggers and checkpoints see the base rate, and nothing drifts when k changes. After a step that
    raised, the scaled rate stays until the next step or `remove`.

    Args:
        optimizer: any torch optimiser.
        rule: 'sqrt' as the paper (the variance of the gradient falls as 1/k), 'linear' as the
            release for WikiText-2, or 'none'.

    Attributes:
        factor: what the rate is multiplied by in the coming step.

    A new one on the same optimiser takes the place of the one before.

    >>> import torch
    >>> w = torch.zeros(1, requires_grad=True)
    >>> optimizer = torch.optim.SGD([w], lr=0.1)
    >>> scale = StepScale(optimizer, "sqrt")
    >>> w.grad = torch.ones(1)
    >>> scale.step(4)
    >>> optimizer.step()
    >>> round(w.item(), 6), optimizer.param_groups[0]["lr"]
    (-0.2, 0.1)
    """

    def __init__(self, optimizer: Optimizer, rule: Rule = "sqrt") -> None:
        if rule not in _FACTORS:
            raise ValueError(f"rule must be one of {', '.join(_FACTORS)}; got {rule!r}")
        for hook in list(optimizer._optimizer_step_pre_hooks.values()):
            # One at a time: two would each take the other's scaled rate for the base rate.
            before = getattr(hook, "__self__", None)
            if isinstance(before, StepScale):
                before.remove()
        self.rule = rule
        self.factor = 1.0
        self._optimizer = optimizer
        self._base: list[Any] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._scale),
            optimizer.register_step_post_hook(self._restore),
        ]

    def step(self, k: int) -> None:
        """Announce the k of the coming `optimizer.step()`; it holds until announced anew."""
        self.factor = _FACTORS[self.rule](k)

    def remove(self) -> None:
        """Take the hooks off the optimiser; a rate that a step left scaled is put back."""
        for handle in self._handles:
            handle.remove()
        self._restore(self._optimizer)

    def _scale(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore(optimizer)  # a rate left behind by a step that raised is not the base rate
        self._base = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor

    def _restore(self, optimizer: Optimizer, *_: Any) -> None:
        for group, base in zip(optimizer.param_groups, self._base, strict=False):
            group["lr"] = base
        self._base = []
