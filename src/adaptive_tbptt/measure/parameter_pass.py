"""Steps of any module, each with a graph of its own, and what each contributes to the gradient.

Cut apart like this, the parameters of a step are reached from that step alone, which is what the
contribution of a lag means. Where every use of a parameter is an affine map one pass per step
serves all rows; otherwise there is one pass per row, which is slow and always right.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from .._torch.number_formats import no_autocast
from ..data.nest import State, detach, leaves, map_leaves, with_gradients
from ..data.segment import Segment
from ..model.recurrent import Recurrent
from ..model.steps import Step, unroll
from .affine_uses import Recorder
from .parameter_lags import ParameterLags


def as_variable(leaf: Tensor) -> Tensor:
    """Return a detached copy to differentiate for; integers stay constants."""
    return leaf.detach().clone().requires_grad_(leaf.is_floating_point())


def check_carries(recurrent: Recurrent, state: State) -> None:
    """Refuse a state that no gradient flows through."""
    if torch.is_grad_enabled() and not any(x.requires_grad for x in leaves(state)):
        raise ValueError(
            f"the state of {type(recurrent.module).__name__} carries no gradient: it is "
            "detached inside, made under no_grad, or not of floating point"
        )


class ParameterPass:
    """Steps run forward, to be backpropagated one by one; see `Pass` in segments.py.

    Args:
        recurrent: the model.
        segment: the steps.
        state: state entering the first.
        lags: where their contributions go.
    """

    def __init__(
        self, recurrent: Recurrent, segment: Segment, state: State, lags: ParameterLags
    ) -> None:
        self._recurrent, self._lags = recurrent, lags
        self._steps: list[tuple[Step, Recorder | None]] = []
        recorded = lags.affine and not recurrent.fused  # inside of a fused layer nothing is seen
        for t in range(segment.steps):
            one = segment.between(t, t + 1)
            recorder = lags.recorder(recurrent, one.inputs) if recorded else None
            with recorder or nullcontext():
                (step,) = unroll(recurrent, one.inputs, map_leaves(as_variable, state), one.resets)
            check_carries(recurrent, step.leaving)
            if torch.is_grad_enabled():
                self._steps.append((step, recorder))
            state = detach(step.leaving)
        self.leaving = state

    def backward(self, gradients: list[Tensor]) -> list[Tensor]:
        """See `Pass`."""
        found = []
        for step, recorder in reversed(self._steps):
            gradients = self._step_back(step, recorder, gradients)
            found.append(gradients)
        return [torch.stack(leaf[::-1]) for leaf in zip(*found, strict=True)]

    def _step_back(
        self, step: Step, recorder: Recorder | None, gradients: list[Tensor]
    ) -> list[Tensor]:
        """Return the gradients with respect to what entered the step; note its contribution."""
        leaving, dims = leaves(step.leaving), self._recurrent.known_dims
        kept = [i for i, x in enumerate(leaving) if x.requires_grad]
        outputs, given = [leaving[i] for i in kept], [gradients[i] for i in kept]
        entering = leaves(step.entering)
        wanted = [x for x in entering if x.requires_grad]
        with no_autocast(outputs[0].device):
            if recorder is None:
                self._lags.add_rows(
                    self._gradients(outputs, [_only_row(gradients[i], dims[i], row) for i in kept])
                    for row in range(self._lags.rows)
                )
            else:
                wanted += [call.result for call in recorder.calls]
            found = iter(
                torch.autograd.grad(
                    outputs, wanted, given, allow_unused=True, materialize_grads=True
                )
            )
        before: list[Tensor] = with_gradients(entering, found)
        if recorder is not None:
            self._lags.add_uses(recorder.from_gradients(found), steps=1)
        return before

    def _gradients(self, outputs: list[Tensor], given: list[Tensor]) -> list[Tensor | None]:
        parameters = list(self._lags.parameters.values())
        return list(
            torch.autograd.grad(outputs, parameters, given, retain_graph=True, allow_unused=True)
        )


def _only_row(gradient: Tensor, dim: int | None, row: int) -> Tensor:
    alone = torch.zeros_like(gradient)
    if dim is not None:
        alone.select(dim, row).copy_(gradient.select(dim, row))
    return alone
