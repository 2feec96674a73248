"""The fast path of the probe: models whose state is that of one `nn.LSTM`, `nn.GRU` or `nn.RNN`.

The last step, with the readout and the loss, is run by autograd as for any model. What remains is
the gradient of its entering state with respect to all earlier ones, and that involves the layer
alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._torch.preserve_model import preserve
from ..data.nest import Nest, State, detach, leaves, map_leaves, select_rows, steps_of
from ..model.recurrent import Recurrent
from ..model.running import unroll
from .gates import SublayerPass, run_sublayer, weights_of


class _Captured(Exception):
    """Ends a forward pass once the input of the layer is known."""


def recurrent_layer_of(recurrent: Recurrent) -> nn.RNNBase | None:
    """Return the one layer that may be all of the model's recurrence, if there is just one."""
    found: list[Any] = [
        m for m in recurrent.module.modules() if type(m) in (nn.LSTM, nn.GRU, nn.RNN)
    ]
    cells = any(isinstance(m, nn.RNNCellBase) for m in recurrent.module.modules())
    if len(found) != 1 or cells or found[0].bidirectional:
        return None
    layer: nn.RNNBase = found[0]
    return layer


def layer_inputs(recurrent: Recurrent, layer: nn.RNNBase, inputs: Nest, state: State) -> Tensor:
    """Run the model up to its layer and return what the layer is given, time first."""
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


def layer_pass(recurrent: Recurrent, layer: nn.RNNBase, inputs: Nest, state: State) -> LayerPass:
    """Run the model's layer over `inputs` of `(steps, rows, ...)`, starting from `state`."""
    with torch.no_grad():
        x = layer_inputs(recurrent, layer, inputs, state)
        return LayerPass(layer, x, detach(state))


def find_fused_layer(recurrent: Recurrent, inputs: Nest, state: State) -> nn.RNNBase | None:
    """Return the layer whose fast path equals the general one for this model, if there is one.

    Both are compared on a few steps of up to two rows. They agree where the model hands its state
    to the layer as it is, returns the layer's as its own, and computes the layer's input from its
    inputs alone. A single step does not tell whether the layer is given all steps at once.
    """
    layer = recurrent_layer_of(recurrent)
    if layer is None or steps_of(inputs) < 2 or not _is_exact(recurrent, layer, inputs, state):
        return None
    return layer


def _is_exact(recurrent: Recurrent, layer: nn.RNNBase, inputs: Nest, state: State) -> bool:
    kinds = 2 if isinstance(layer, nn.LSTM) else 1
    if [x.dim() for x in leaves(state)] != [3] * kinds:
        return False
    rows = torch.arange(min(2, leaves(inputs)[0].shape[1]))
    few = map_leaves(lambda x: x[:3, : len(rows)], inputs)
    start = select_rows(detach(state), rows, recurrent.dims(inputs))
    if not _hands_on(recurrent, layer, few, start):
        return False
    generator = torch.Generator().manual_seed(0)
    with preserve(recurrent.module, train=False, backward=True):
        with torch.no_grad():
            try:
                ours = LayerPass(layer, layer_inputs(recurrent, layer, few, start), start)
            except (RuntimeError, ValueError, IndexError):
                return False
        with torch.enable_grad():
            variable = map_leaves(lambda x: x.clone().requires_grad_(), start)
            steps = list(
                unroll(recurrent, few, variable, prepare=lambda s: map_leaves(Tensor.view_as, s, s))
            )
            final, entering = leaves(steps[-1].leaving), [leaves(s.entering) for s in steps]
            if [x.shape for x in final] != [x.shape for x in ours.final] or not all(
                x.requires_grad for x in final
            ):
                return False
            given = [
                torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in final
            ]
            wanted = [x for step in entering for x in step]
            theirs = torch.autograd.grad(
                final, wanted, given, allow_unused=True, materialize_grads=True
            )
        mine = ours.backward(given)
    same = all(torch.allclose(a, b, 1e-3, 1e-5) for a, b in zip(ours.final, final, strict=True))
    flat = [mine[i][t] for t in range(len(steps)) for i in range(kinds)]
    return same and all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(flat, theirs, strict=True)
    )


def _hands_on(recurrent: Recurrent, layer: nn.RNNBase, inputs: Nest, state: State) -> bool:
    """Whether the state goes into the layer and out of the model as it is, in training too."""
    seen: list[Any] = []

    def note(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        seen.append((args[1] if len(args) > 1 else named.get("hx"), result[1]))

    handle = layer.register_forward_hook(note, with_kwargs=True)
    try:
        with preserve(recurrent.module, train=True), torch.no_grad():
            _, leaving = recurrent.core(inputs, state)
    except (RuntimeError, ValueError, IndexError):
        return False
    finally:
        handle.remove()
    if len(seen) != 1:
        return False
    pairs = zip(((state, leaving)), seen[0], strict=True)
    return all(
        [x.shape for x in leaves(a)] == [x.shape for x in leaves(b)]
        and all(torch.equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))
        for a, b in pairs
    )


class LayerPass:
    """The layer run forward without gradient, one sublayer at a time; see `Pass` in passes.py.

    Args:
        layer: the layer.
        x: its input, time first.
        state: state entering the first step.

    Attributes:
        leaving: the state after the last step.
        final: its leaves.
    """

    def __init__(self, layer: nn.RNNBase, x: Tensor, state: State) -> None:
        self._layer = layer
        x = x.detach()
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
        self.final = [
            torch.stack(parts) for parts in zip(*(p.leaving for p in self._passes), strict=True)
        ]
        reached = iter(self.final)
        self.leaving = map_leaves(lambda _: next(reached), state)

    def backward(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return `(steps, layers, rows, dims)` per state leaf."""
        steps = len(self._passes[0].out)
        found: list[Any] = [g.new_empty(steps, *g.shape) for g in gradients]
        above: Tensor | None = None
        for index in reversed(range(len(self._passes))):
            entering = self._passes[index].backward(above, [g[index] for g in gradients])
            for store, gradient in zip(found, entering.state, strict=True):
                store[:, index] = gradient
            if index:
                above = entering.gates @ weights_of(self._layer, index).ih
                mask = self.masks[index]
                above = above if mask is None else above * mask
        return found
