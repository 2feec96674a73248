"""The step size of Algorithm 1, gamma * sqrt(K2), applied without overwriting gamma."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from torch.optim import ASGD, SGD, Optimizer

from .window import Window

Rule = Literal["sqrt", "linear", "none"]

_FACTORS: dict[str, Callable[[int], float]] = {
    "sqrt": math.sqrt,
    "linear": float,
    "none": lambda losses: 1.0,
}


def rule_for(optimizer: Optimizer, rule: Rule | None = None) -> Rule:
    """Return the given rule; for None, the one that suits the optimiser.

    That is 'sqrt' for `SGD`, with or without momentum, and `ASGD`. It is 'none' for all others:
    Adam and its kin divide the gradient by its own size, so the length of their steps does not
    depend on how noisy the mean over K2 losses is. One of our runs with Adam, its rate scaled by
    sqrt(K), ended 26 % worse than its best.

    >>> import torch
    >>> weight = torch.zeros(1, requires_grad=True)
    >>> rule_for(torch.optim.SGD([weight], lr=0.1)), rule_for(torch.optim.Adam([weight]))
    ('sqrt', 'none')
    """
    if rule is None:
        return "sqrt" if isinstance(optimizer, SGD | ASGD) else "none"
    if rule not in _FACTORS:
        raise ValueError(f"rule must be one of {', '.join(_FACTORS)}, or None; got {rule!r}")
    return rule


class StepScale:
    """Scale the learning rate with the losses of a window, only while `optimizer.step()` runs.

    A window averages over K2 losses (`window.losses`; K2 = K in the paper). Algorithm 1 takes
    steps of gamma * sqrt(K2). A hook scales the rate before the step, a second hook restores it
    afterwards. Schedulers, loggers and checkpoints therefore see the base rate gamma, and the rate
    does not drift when K2 changes. If a step raises, the rate stays scaled until the next step or
    `remove` restores it.

    `step(window)` does not update the parameters. It announces the window whose gradient the
    coming `optimizer.step()` applies:

        scale = StepScale(optimizer)
        for window in tbptt.windows(stream):
            window.backward()
            scale.step(window)
            optimizer.step()
            optimizer.zero_grad()

    An optimiser has at most one `StepScale`: a new one replaces the one before.

    Args:
        optimizer: any torch optimiser.
        rule: the factor on the rate: 'sqrt' is sqrt(K2), 'linear' is K2, 'none' is 1. None follows
            the optimiser: 'sqrt' for SGD and ASGD, 'none' for all others.

    Attributes:
        rule: the rule in use.
        factor: what the coming step multiplies the rate by; 1 before the first `step`.

    Choosing `rule`: 'sqrt' is the paper's, for SGD. The variance of the mean gradient falls as
    1 / K2, so a step sqrt(K2) times as long has the same noise. 'linear' is what the authors'
    release does for WikiText-2. 'none' is for Adam and its kin, which normalise the gradient
    themselves (`rule_for`).

    >>> import torch
    >>> from adaptive_tbptt import AdaptiveTBPTT, FixedTruncation, SequenceStream
    >>> model, x = torch.nn.RNN(1, 1), torch.ones(4, 1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> tbptt = AdaptiveTBPTT(model, torch.nn.functional.mse_loss, FixedTruncation(4))
    >>> scale = StepScale(optimizer)
    >>> for window in tbptt.windows(SequenceStream(x, x)):
    ...     _ = window.backward()
    ...     scale.step(window)
    ...     optimizer.step()
    >>> scale.factor, optimizer.param_groups[0]["lr"]
    (2.0, 0.1)
    """

    def __init__(self, optimizer: Optimizer, rule: Rule | None = None) -> None:
        self.rule = rule_for(optimizer, rule)
        for hook in list(optimizer._optimizer_step_pre_hooks.values()):
            # With two sets of hooks, each would take the rate that the other scaled for the base.
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, StepScale):
                owner.remove()
        self.factor = 1.0
        self._optimizer = optimizer
        self._base: list[Any] = []  # the rates to restore; empty unless a step is under way
        self._handles = [
            optimizer.register_step_pre_hook(self._scale),
            optimizer.register_step_post_hook(self._restore),
        ]

    def step(self, window: Window) -> None:
        """Set the factor of the coming `optimizer.step()`; it holds until the next call.

        The factor follows `window.rated_losses`: the last window of an epoch may carry fewer
        losses, and then takes a smaller step. One of the long windows of a loop takes a usual step:
        a rate close to the largest that works does not get larger with it.
        """
        if not hasattr(window, "rated_losses"):
            raise TypeError(
                f"step takes the window whose gradient is applied, got {type(window).__name__}: "
                "write scale.step(window)"
            )
        self.factor = _FACTORS[self.rule](window.rated_losses)

    def remove(self) -> None:
        """Remove the hooks, and restore a rate that a failed step left scaled."""
        for handle in self._handles:
            handle.remove()
        self._restore(self._optimizer)

    def _scale(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # The rate is still scaled if the last step raised (torch then calls no post hook), or if
        # this hook runs twice for one step (a subclass whose step calls super().step).
        self._restore(optimizer)
        self._base = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            # Not in place: the rate may be a tensor, and then `_base` holds the same one.
            group["lr"] = group["lr"] * self.factor

    def _restore(self, optimizer: Optimizer, *_: Any) -> None:
        # A group that was added since the pre hook has no base rate yet, hence strict=False.
        for group, base in zip(optimizer.param_groups, self._base, strict=False):
            group["lr"] = base
        self._base = []
