"""The step that carries the loss: readout, loss, and the parameters that enter there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.number_formats import autocast_format, no_autocast
from ..data.nest import State, leaves, map_leaves, with_gradients
from ..data.rows import reset_rows, select_rows
from ..data.segment import Segment, rows_of
from ..model.losses import CountLosses
from ..model.recurrent import LossFn, Recurrent
from ..model.steps import Step, unroll
from .affine_uses import Recorder
from .fused_layer import LayerPass, recurrent_layer_of
from .parameter_lags import ParameterLags
from .parameter_pass import as_variable

NOT_REACHED = (
    "no gradient reaches the state: the loss does not depend on the state that entered its step"
)


class LastStep:
    """One step with its loss, summed over the rows.

    Args:
        recurrent: the model.
        loss_fn: a mean over time and batch.
        segment: that one step.
        state: state entering it.
        lags: where the contribution of lag 0 is to go.
        count_losses: the weight of targets in a mean.

    Attributes:
        step: what was run.
        scale: what the loss is multiplied by, so that float16 holds the gradients of the lags.
    """

    def __init__(
        self,
        recurrent: Recurrent,
        loss_fn: LossFn,
        segment: Segment,
        state: State,
        lags: ParameterLags | None,
        count_losses: CountLosses,
    ) -> None:
        self._recurrent, self._loss_fn, self._segment = recurrent, loss_fn, segment
        self._state, self._lags, self._count = state, lags, count_losses
        self._recorder: Recorder | None = None
        self._layer = recurrent_layer_of(recurrent) if recurrent.fused else None
        # Recording runs the layer twice, and dropout between its sublayers would differ.
        if lags is not None and lags.affine and not _drops_inside(self._layer):
            self._recorder = lags.recorder(recurrent, segment.inputs, beside=self._layer)
        with _observed(self._layer, self._recorder) as self._seen:
            self.step, self._loss = self._run(segment, state)
        self.scale = self._find_scale()

    def backward(self) -> tuple[Tensor | None, list[Tensor]]:
        """Return the gradient at the readout, and at the leaves of the state that entered."""
        calls = [] if self._recorder is None else [c.result for c in self._recorder.calls]
        layer = [] if self._recorder is None else self._seen[1:]
        readout, lag1, inside = self._differentiate(self._loss * self.scale, [*calls, *layer])
        if self._lags is None:
            return readout, lag1
        self._lags.scale = self.scale
        if self._recorder is None:
            self._lags.add_rows(self._row_gradients(row) for row in range(self._lags.rows))
            return readout, lag1
        uses = self._recorder.from_gradients(inside[: len(calls)])
        if self._layer is not None:
            out, *state = inside[len(calls) :]
            out = out.transpose(0, 1) if self._layer.batch_first else out
            x = self._seen[0].transpose(0, 1) if self._layer.batch_first else self._seen[0]
            with torch.no_grad():
                passed = LayerPass(self._layer, x.detach(), self._started(), self._lags)
                uses += passed.backward_from(out, state)[1]
        self._lags.add_uses(uses, steps=1)
        return readout, lag1

    def _started(self) -> State:
        """Return the state that the layer is given: that of rows which start here is initial."""
        resets = self._segment.resets
        if resets is None:
            return self._state
        initial = self._recurrent.initial_state(self._segment.inputs)
        return reset_rows(self._state, resets[0], initial, self._recurrent.known_dims)

    def _run(self, segment: Segment, state: State) -> tuple[Step, Tensor]:
        """Run the step and return it with the loss summed over its rows."""
        recurrent = self._recurrent
        (step,) = unroll(recurrent, segment.inputs, map_leaves(as_variable, state), segment.resets)
        if recurrent.has_features and not isinstance(step.features, Tensor):
            raise TypeError(
                f"core must return its features as one tensor, got {type(step.features).__name__}"
            )
        loss = recurrent.loss(self._loss_fn, step.features, segment.targets)
        if not torch.isfinite(loss):
            raise ValueError(f"the loss is {loss.item()}: nothing can be measured there")
        return step, loss * rows_of(segment.inputs)

    def _differentiate(
        self, loss: Tensor, inside: list[Tensor], again: bool = False
    ) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
        """Return gradients at the readout, the entering state and the tensors `inside`."""
        if not loss.requires_grad:
            raise ValueError(f"{NOT_REACHED}. It depends on nothing that has a gradient")
        entering = leaves(self.step.entering)
        wanted = [x for x in entering if x.requires_grad]
        if self._recurrent.has_features:
            wanted.append(self.step.features)
        with no_autocast(loss.device):
            found = iter(
                torch.autograd.grad(
                    loss,
                    [*wanted, *inside],
                    retain_graph=again,
                    allow_unused=True,
                    materialize_grads=True,
                )
            )
        lag1: list[Tensor] = with_gradients(entering, found)
        readout = next(found) if self._recurrent.has_features else None
        return readout, lag1, list(found)

    def _row_gradients(self, row: int) -> list[Tensor | None]:
        """Run one row alone and return the gradient of its loss."""
        assert self._lags is not None
        parameters = list(self._lags.parameters.values())
        segment = Segment(*(map_leaves(lambda x: x[:, row : row + 1], p) for p in self._segment))
        # What the row's own mean counts in the mean over all rows.
        weight, whole = self._count(segment.targets), self._count(self._segment.targets)
        share = weight / whole * self._lags.rows
        if share == 0.0:
            return [None] * len(parameters)
        only = torch.tensor([row])
        _, loss = self._run(segment, select_rows(self._state, only, self._recurrent.known_dims))
        with no_autocast(loss.device):
            return list(
                torch.autograd.grad(loss * share * self.scale, parameters, allow_unused=True)
            )

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
        _, lag1, _ = self._differentiate(self._loss, [], again=True)
        largest = max(float(g.abs().max()) for g in lag1)
        rows = rows_of(self._segment.inputs) if self._loss.dtype is torch.float16 else 1
        most = 15 - math.ceil(math.log2(rows))
        if largest == 0.0:
            return 2.0**most
        if not math.isfinite(largest):
            return 1.0
        return 2.0 ** min(math.floor(8 - math.log2(largest)), most)


def _drops_inside(layer: nn.RNNBase | None) -> bool:
    """Whether the layer applies dropout between its sublayers."""
    return layer is not None and layer.training and layer.dropout > 0.0 and layer.num_layers > 1


@contextmanager
def _observed(layer: nn.Module | None, recorder: Recorder | None) -> Iterator[list[Tensor]]:
    """Record uses inside of the block, and note input, output and state of the layer."""
    seen: list[Any] = []
    if recorder is None:
        yield seen
        return

    def note(module: nn.Module, args: tuple[Any, ...], named: Any, result: Any) -> None:
        seen.extend([args[0] if args else named["input"], result[0], *leaves(result[1])])

    handle = layer and layer.register_forward_hook(note, with_kwargs=True)
    try:
        with recorder:
            yield seen
    finally:
        if handle:
            handle.remove()
