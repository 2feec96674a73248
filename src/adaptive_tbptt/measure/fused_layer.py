"""The fast path of the probe: models whose state is that of one `nn.LSTM`, `nn.GRU` or `nn.RNN`.

The last step, with the readout and the loss, is run by autograd as for any model. What remains is
the gradient of its entering state with respect to all earlier ones, and that involves the layer
alone.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._torch.preserve_model import preserve
from ..data.nest import Nest, State, detach, leaves, map_leaves
from ..data.rows import select_rows
from ..data.segment import steps_of
from ..model.recurrent import Recurrent
from ..model.steps import unroll
from .affine_uses import NotAffine, Recorder, Use
from .gates import Entering, LstmPass, SublayerPass, run_sublayer, weights_of
from .parameter_lags import ParameterLags


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


def layer_pass(
    recurrent: Recurrent, inputs: Nest, state: State, lags: ParameterLags | None = None
) -> LayerPass | None:
    """Run the model's layer over `inputs`, or return None where the fast path does not apply.

    Args:
        recurrent: the model.
        inputs: `(steps, rows, ...)`.
        state: state entering the first step.
        lags: where the contributions of these steps are to go.
    """
    layer = recurrent_layer_of(recurrent)
    if not is_fused(recurrent, inputs, state) or layer is None:
        return None
    encoder = None
    if lags is not None and torch.is_grad_enabled():
        encoder = lags.recorder(recurrent, inputs, beside=layer)
    with torch.set_grad_enabled(encoder is not None), encoder or nullcontext():
        x = layer_inputs(recurrent, layer, inputs, state)
    with torch.no_grad():
        return LayerPass(layer, x, detach(state), lags, encoder)


def is_fused(recurrent: Recurrent, inputs: Nest, state: State) -> bool:
    """Tell whether the fast path applies; found out once, on the first inputs of several steps.

    A single step does not tell whether the layer is given all steps at once. Under autocast the
    products change their type; the general path leaves that to torch.
    """
    if torch.is_autocast_enabled(recurrent.device.type):
        return False
    if recurrent.fused is None and steps_of(inputs) > 1:
        recurrent.fused = _is_exact(recurrent, inputs, state)
    return bool(recurrent.fused)


def _is_exact(recurrent: Recurrent, inputs: Nest, state: State) -> bool:
    """Compare both paths on a few steps of up to two rows; what they disagree on is not fused.

    They agree where the model hands its state to the layer as it is, returns the layer's as its
    own, and computes the layer's input from its inputs alone.
    """
    layer = recurrent_layer_of(recurrent)
    kinds = 2 if isinstance(layer, nn.LSTM) else 1
    if layer is None or [x.dim() for x in leaves(state)] != [3] * kinds:
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
    """The layer run forward without gradient, one sublayer at a time.

    Args:
        layer: the layer.
        x: its input, time first.
        state: state entering the first step.
        lags: where the contributions of these steps are to go.
        encoder: the uses of parameters that led to `x`.
    """

    def __init__(
        self,
        layer: nn.RNNBase,
        x: Tensor,
        state: State,
        lags: ParameterLags | None = None,
        encoder: Recorder | None = None,
    ) -> None:
        self._layer, self._encoded, self._lags, self._encoder = layer, x, lags, encoder
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
        """Return `(steps, layers, rows, dims)` per state leaf; see `Pass` in segments.py."""
        found, uses = self.backward_from(None, gradients)
        if self._lags is not None:
            self._lags.add_uses(uses, len(found[0]))
        return found

    def backward_from(
        self, above: Tensor | None, gradients: list[Tensor]
    ) -> tuple[list[Tensor], list[Use]]:
        """Backpropagate; return gradients of the states, and how the parameters were used.

        Args:
            above: gradient with respect to the output of the layer, time first, or None.
            gradients: with respect to the state after the last step.
        """
        steps = len(self._passes[0].out)
        found: list[Any] = [g.new_empty(steps, *g.shape) for g in gradients]
        uses: list[Use] = []
        for index in reversed(range(len(self._passes))):
            entering = self._passes[index].backward(above, [g[index] for g in gradients])
            for store, gradient in zip(found, entering.state, strict=True):
                store[:, index] = gradient
            if self._lags is not None:
                uses += self._uses(index, entering)
            if index or (self._encoder is not None and self._encoder.calls):
                above = entering.gates @ weights_of(self._layer, index).ih
                mask = self.masks[index]
                above = above if mask is None else above * mask
        if self._encoder is not None and self._encoded.requires_grad and above is not None:
            uses += self._encoder.uses([self._encoded], [above])
        return found, uses

    def _uses(self, index: int, entering: Entering) -> list[Use]:
        part = self._passes[index]
        factors: dict[str, tuple[Tensor, Tensor | None]] = {
            "weight_ih": (entering.gates, part.x),
            "weight_hh": (entering.recurrent, part.before),
            "bias_ih": (entering.gates, None),
            "bias_hh": (entering.recurrent, None),
        }
        if entering.projected is not None and isinstance(part, LstmPass):
            factors["weight_hr"] = (entering.projected, part.unprojected)
        uses = []
        for name, (left, right) in factors.items():
            parameter = getattr(self._layer, f"{name}_l{index}", None)
            if parameter is None or not parameter.requires_grad:
                continue
            if not isinstance(parameter, nn.Parameter):  # weight dropout, weight normalisation
                raise NotAffine(f"{name}_l{index} is computed from parameters")
            uses.append(Use(parameter, left, right))
        return uses
