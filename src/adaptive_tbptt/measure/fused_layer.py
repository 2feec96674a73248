"""The fast path of the probe: models whose state is that of one `nn.LSTM`, `nn.GRU` or `nn.RNN`.

Autograd runs the step of the loss, as for any model. From there to all earlier states the gradient
flows through the layer alone.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._torch.number_formats import autocast_format
from .._torch.preserve_model import preserve
from ..data.nest import (
    Nest,
    State,
    detach,
    leaves,
    map_leaves,
    per_row,
    reset_rows,
    select_rows,
    steps_of,
)
from ..data.segment import Segment
from ..model.recurrent import Recurrent
from .gates import SublayerPass, run_sublayer
from .passes import Pass, StepPass


class LayerPass:
    """The layer run forward without gradient, one sublayer at a time; see `Pass`.

    Args:
        layer: the layer.
        x: its input, time first.
        state: state entering the first step.
    """

    @torch.no_grad()
    def __init__(self, layer: nn.RNNBase, x: Tensor, state: State) -> None:
        self._passes: list[SublayerPass] = []
        self.masks: list[Tensor | None] = []
        start = leaves(state)
        for index in range(layer.num_layers):
            mask = None
            if index and layer.training and layer.dropout:
                mask = F.dropout(torch.ones_like(x), layer.dropout)
                x = x * mask
            self.masks.append(mask)
            self._passes.append(run_sublayer(layer, index, x, [leaf[index] for leaf in start]))
            x = self._passes[-1].out
        final = zip(*(p.leaving for p in self._passes), strict=True)
        self.leaving = map_leaves(lambda _: torch.stack(next(final)), state)

    def backward(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return `(steps, layers, rows, dims)` per state leaf."""
        steps = len(self._passes[0].out)
        found = [g.new_empty(steps, *g.shape) for g in gradients]
        above: Tensor | None = None
        for index, sublayer in reversed(list(enumerate(self._passes))):
            entering, gates = sublayer.backward(above, [g[index] for g in gradients])
            for store, gradient in zip(found, entering, strict=True):
                store[:, index] = gradient
            if index:
                above = gates @ sublayer.w.ih
                mask = self.masks[index]
                above = above if mask is None else above * mask
        return found


class ResetPass:
    """Consecutive passes over the stretches between resets.

    Args:
        recurrent: the model.
        parts: the stretches, in the order of time.
        masks: for each `(rows,)`, true if the row resets at its first step; None for no reset.
    """

    def __init__(self, recurrent: Recurrent, parts: list[Pass], masks: list[Tensor | None]) -> None:
        self._recurrent, self._parts, self._masks = recurrent, parts, masks
        self.leaving = parts[-1].leaving

    def backward(self, gradients: list[Tensor]) -> list[Tensor]:
        """See `Pass`."""
        found = []
        for part, mask in zip(reversed(self._parts), reversed(self._masks), strict=True):
            steps = part.backward(gradients)
            if mask is not None:  # no gradient crosses a reset
                for leaf, dim in zip(steps, self._recurrent.known_dims, strict=True):
                    if dim is not None:
                        leaf[0] *= per_row(~mask.to(leaf.device), leaf[0], dim)
            gradients = [leaf[0] for leaf in steps]
            found.append(steps)
        return [torch.cat(leaf[::-1]) for leaf in zip(*found, strict=True)]


def fused_pass(recurrent: Recurrent, layer: nn.RNNBase, segment: Segment, state: State) -> Pass:
    """Take the fast path between resets."""
    resets = segment.resets
    if resets is None or not resets.any():
        return LayerPass(layer, _layer_inputs(recurrent, layer, segment.inputs, state), state)
    initial = recurrent.initial_state(segment.inputs)
    if any(leaf.requires_grad for leaf in leaves(initial)):
        # The fast path does not cover a learned initial state, which has a gradient of its own.
        return StepPass(recurrent, segment, state)
    starts = torch.nonzero(resets.any(dim=1)).flatten().tolist()
    parts: list[Pass] = []
    masks: list[Tensor | None] = []
    for start, stop in pairwise(sorted({0, *starts, segment.steps})):
        mask = resets[start] if start in starts else None
        if mask is not None:
            state = reset_rows(state, mask, initial, recurrent.known_dims)
        inputs = segment.between(start, stop).inputs
        parts.append(LayerPass(layer, _layer_inputs(recurrent, layer, inputs, state), state))
        masks.append(mask)
        state = parts[-1].leaving
    return ResetPass(recurrent, parts, masks)


class _Captured(Exception):
    """Ends a forward pass once the input of the layer is known."""


@torch.no_grad()
def _layer_inputs(recurrent: Recurrent, layer: nn.RNNBase, inputs: Nest, state: State) -> Tensor:
    """Run the model up to its layer and return the layer's input, time first."""
    seen: list[Any] = []

    def stop(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.append(args[0] if args else named["input"])
        raise _Captured

    handle = layer.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        recurrent.core(inputs, state)
    except _Captured:
        pass
    finally:
        handle.remove()
    if not seen:
        raise RuntimeError("the model did not call its recurrent layer")
    x = seen[0]
    if not isinstance(x, Tensor):
        raise ValueError("the layer is given packed sequences")
    x = x.transpose(0, 1) if layer.batch_first else x
    if x.dim() != 3 or len(x) != steps_of(inputs):
        raise ValueError("the layer is not given all steps at once")
    return x


class ProbePlan:
    """Which path probes take through a model: the first probe decides, later ones follow.

    The decision holds for one device and number format. Under autocast products change their
    format, so probes take the general path, which leaves that to torch.
    """

    def __init__(self) -> None:
        self._home: Any = None
        self._layer: nn.RNNBase | None = None

    def layer(self, recurrent: Recurrent, inputs: Nest, state: State) -> nn.RNNBase | None:
        """Return the layer to take the fast path through; None takes the general path."""
        # A single step cannot show whether the layer receives all steps at once.
        if steps_of(inputs) < 2 or autocast_format(recurrent.device) is not None:
            return None
        home = recurrent.home
        if self._home is None or self._home != home:
            self._home, self._layer = home, find_fused_layer(recurrent, inputs, state)
        return self._layer


def find_fused_layer(recurrent: Recurrent, inputs: Nest, state: State) -> nn.RNNBase | None:
    """Return the layer whose fast path equals the general one for this model, if there is one.

    Both run a few steps of up to two rows. They agree if the model passes its state to the layer
    unchanged, returns the layer's state unchanged, and feeds the layer from the inputs alone.
    """
    modules = list(recurrent.module.modules())
    layers: list[Any] = [m for m in modules if type(m) in (nn.LSTM, nn.GRU, nn.RNN)]
    cells = any(isinstance(m, nn.RNNCellBase) for m in modules)
    if len(layers) != 1 or cells or layers[0].bidirectional:
        return None
    layer: nn.RNNBase = layers[0]
    if [x.dim() for x in leaves(state)] != [3] * (2 if isinstance(layer, nn.LSTM) else 1):
        return None
    rows = torch.arange(min(2, leaves(inputs)[0].shape[1]))
    few = map_leaves(lambda x: x[:3, : len(rows)], inputs)
    start = select_rows(detach(state), rows, recurrent.dims(inputs))
    try:
        same = _hands_on(recurrent, layer, few, start) and _agrees(recurrent, layer, few, start)
    except (RuntimeError, ValueError, IndexError):  # the general path will report what is wrong
        return None
    return layer if same else None


def _hands_on(recurrent: Recurrent, layer: nn.RNNBase, inputs: Nest, state: State) -> bool:
    """Whether model and layer share their state unchanged, also in training mode."""
    seen: list[Any] = []

    def note(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        seen.append((args[1] if len(args) > 1 else named.get("hx"), result[1]))

    handle = layer.register_forward_hook(note, with_kwargs=True)
    try:
        with preserve(recurrent.module, train=True), torch.no_grad():
            _, leaving = recurrent.core(inputs, state)
    finally:
        handle.remove()
    if len(seen) != 1:
        return False
    own, layers = leaves((state, leaving)), leaves(seen[0])
    return len(own) == len(layers) and all(map(torch.equal, own, layers))


def _agrees(recurrent: Recurrent, layer: nn.RNNBase, inputs: Nest, state: State) -> bool:
    """Whether both paths return the same state and the same gradients, up to rounding."""
    with preserve(recurrent.module, train=False, backward=True):
        fast = LayerPass(layer, _layer_inputs(recurrent, layer, inputs, state), state)
        general = StepPass(recurrent, Segment(inputs, None), state)
        mine, theirs = leaves(fast.leaving), leaves(general.leaving)
        if not all(x.requires_grad for x in theirs) or not _close(mine, theirs):
            return False
        generator = torch.Generator().manual_seed(0)
        given = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in mine]
        return _close(fast.backward(given), general.backward(given))


def _close(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return [x.shape for x in ours] == [x.shape for x in theirs] and all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(ours, theirs, strict=True)
    )
