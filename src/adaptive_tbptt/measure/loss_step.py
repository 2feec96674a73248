"""The step that carries the loss: run, read out, and backpropagated to the state that entered."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._torch.number_formats import autocast_format, no_autocast
from ..data.nest import State, leaves, map_leaves, rows_of, with_gradients
from ..data.stream import Segment
from ..model.objective import Objective
from ..model.running import unroll
from .passes import as_variable

NOT_REACHED = (
    "no gradient reaches the state: the loss does not depend on the state that entered its step"
)


class LossStep:
    """One step with its loss, summed over the rows.

    Args:
        objective: model and loss.
        segment: that one step.
        state: state entering it.

    Attributes:
        step: what was run.
        scale: what the loss is multiplied by, so that float16 holds the gradients of the lags.
    """

    def __init__(self, objective: Objective, segment: Segment, state: State) -> None:
        recurrent = self._recurrent = objective.recurrent
        (self.step,) = unroll(
            recurrent, segment.inputs, map_leaves(as_variable, state), segment.resets
        )
        if recurrent.has_features and not isinstance(self.step.features, Tensor):
            raise TypeError(
                "core must return its features as one tensor, got "
                f"{type(self.step.features).__name__}"
            )
        loss = objective.loss(self.step.features, segment.targets)
        if not torch.isfinite(loss):
            raise ValueError(f"the loss is {loss.item()}: nothing can be measured there")
        self._rows = rows_of(segment.inputs)
        self._loss = loss * self._rows
        self.scale = self._find_scale()

    def backward(self) -> tuple[Tensor | None, list[Tensor]]:
        """Return the gradient at the readout, and at the leaves of the state that entered."""
        return self._differentiate(self._loss * self.scale)

    def _differentiate(
        self, loss: Tensor, again: bool = False
    ) -> tuple[Tensor | None, list[Tensor]]:
        if not loss.requires_grad:
            raise ValueError(f"{NOT_REACHED}. It depends on nothing that has a gradient")
        entering = leaves(self.step.entering)
        wanted = [x for x in entering if x.requires_grad]
        if self._recurrent.has_features:
            wanted.append(self.step.features)
        with no_autocast(loss.device):
            found = iter(
                torch.autograd.grad(
                    loss, wanted, retain_graph=again, allow_unused=True, materialize_grads=True
                )
            )
        lag1: list[Tensor] = with_gradients(entering, found)
        return next(found) if self._recurrent.has_features else None, lag1

    def _find_scale(self) -> float:
        """Return a power of two that keeps the gradients of the lags inside of float16.

        Without it they would be lost below 6e-5. 2^8 for the largest entry at lag 1 is arbitrary:
        it leaves as much room upwards. 2^15 is the largest power that float16 holds; a loss in that
        format is the mean over rows, whose gradient is as many times the scale. Other formats need
        no scale.
        """
        formats = {x.dtype for x in leaves(self.step.entering)}
        if torch.float16 not in formats | {autocast_format(self._loss.device)}:
            return 1.0
        _, lag1 = self._differentiate(self._loss, again=True)
        largest = max(float(g.abs().max()) for g in lag1)
        rows = self._rows if self._loss.dtype is torch.float16 else 1
        most = 15 - math.ceil(math.log2(rows))
        if largest == 0.0:
            return 2.0**most
        if not math.isfinite(largest):
            return 1.0
        return 2.0 ** min(math.floor(8 - math.log2(largest)), most)
