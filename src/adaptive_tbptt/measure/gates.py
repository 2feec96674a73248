"""`nn.LSTM`, `nn.GRU` and `nn.RNN` by hand: one layer forward, and back to every state at once.

Autograd on a layer returns the gradient of its first state only; one call per step would return
all of them, at four to seven times the cost. Here elementwise factors are computed for all steps
together, so that a step needs only one small product with the recurrent weights. Weight gradients
are not computed.

All tensors are time first: `(steps, rows, ...)`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Weights(NamedTuple):
    """The parameters of one layer; absent ones are None."""

    ih: Tensor
    hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    hr: Tensor | None


def weights_of(layer: nn.RNNBase, index: int) -> Weights:
    """Return the parameters of layer `index`, detached."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    parameters = [getattr(layer, f"{name}_l{index}", None) for name in names]
    detached: list[Any] = [p if p is None else p.detach() for p in parameters]
    return Weights(*detached)


Entering = tuple[list[Tensor], Tensor]
"""Gradients with respect to what enters each step, `(steps, rows, dims)`: of h, and of c for an
LSTM; and of the products with the input weights."""


def _from_inputs(w: Weights, x: Tensor, *, both_biases: bool) -> Tensor:
    """Return the products of all steps with the input weights, biases added."""
    bias = w.b_ih
    if both_biases and w.b_ih is not None and w.b_hh is not None:
        bias = w.b_ih + w.b_hh
    return F.linear(x, w.ih, bias)


class LstmPass:
    """One LSTM layer over all steps.

    Args:
        w: its parameters.
        x: `(steps, rows, inputs)`.
        state: h `(rows, projected)` and c `(rows, hidden)` that enter the first step.

    Attributes:
        out: `(steps, rows, projected)`.
        leaving: h and c after the last step.
    """

    def __init__(self, w: Weights, x: Tensor, state: list[Tensor]) -> None:
        h, c = state
        steps, size = len(x), c.shape[-1]
        gates = _from_inputs(w, x, both_biases=True)
        i, f, g, o = gates.unflatten(-1, (4, size)).unbind(2)
        before = x.new_empty(steps + 1, *h.shape)
        cells = x.new_empty(steps + 1, *c.shape)
        squashed = x.new_empty(steps, *c.shape)
        before[0], cells[0] = h, c
        recurrent, first_two = w.hh.t(), gates[..., : 2 * size]
        for t in range(steps):
            gates[t].addmm_(before[t], recurrent)
            first_two[t].sigmoid_()
            g[t].tanh_()
            o[t].sigmoid_()
            torch.mul(f[t], cells[t], out=cells[t + 1]).addcmul_(i[t], g[t])
            torch.tanh(cells[t + 1], out=squashed[t])
            if w.hr is None:
                torch.mul(o[t], squashed[t], out=before[t + 1])
            else:
                torch.mm(o[t] * squashed[t], w.hr.t(), out=before[t + 1])
        self.w, self._gates, self._cells, self._squashed = w, (i, f, g, o), cells, squashed
        self._before, self.out = before[:-1], before[1:]
        self.leaving = [before[-1], cells[-1]]

    def backward(self, above: Tensor | None, gradients: list[Tensor]) -> Entering:
        """Backpropagate.

        Args:
            above: gradient with respect to `out`, or None.
            gradients: with respect to `leaving`.
        """
        w, (i, f, g, o), tanh_c = self.w, self._gates, self._squashed
        gh, gc = gradients
        to_cell = o * (1 - tanh_c**2)
        # Factors of the gates' gradients: on the gradient of c for i, f and g, on that of h for o.
        delta = torch.stack(
            [g * i * (1 - i), self._cells[:-1] * f * (1 - f), i * (1 - g**2), tanh_c * o * (1 - o)],
            dim=2,
        )
        flat = delta.flatten(2)
        enter_h, enter_c = torch.empty_like(self._before), torch.empty_like(tanh_c)
        for t in reversed(range(len(flat))):
            if above is not None:
                gh = gh + above[t]
            gy = gh if w.hr is None else gh @ w.hr
            dc = torch.addcmul(gc, gy, to_cell[t])
            delta[t, :, :3].mul_(dc[:, None])
            delta[t, :, 3].mul_(gy)
            gc = torch.mul(dc, f[t], out=enter_c[t])
            gh = torch.mm(flat[t], w.hh, out=enter_h[t])
        return [enter_h, enter_c], flat


class GruPass:
    """One GRU layer over all steps; see `LstmPass`."""

    def __init__(self, w: Weights, x: Tensor, state: list[Tensor]) -> None:
        (h,) = state
        steps, size = len(x), h.shape[-1]
        gates = _from_inputs(w, x, both_biases=False)
        rz, n = gates.split([2 * size, size], dim=-1)
        inner = torch.empty_like(n)
        before = x.new_empty(steps + 1, *h.shape)
        before[0] = h
        for t in range(steps):
            from_h = F.linear(before[t], w.hh, w.b_hh)
            rz[t].add_(from_h[:, : 2 * size]).sigmoid_()
            inner[t] = from_h[:, 2 * size :]
            n[t].addcmul_(rz[t, :, :size], inner[t]).tanh_()
            torch.lerp(n[t], before[t], rz[t, :, size:], out=before[t + 1])
        self.w, self._gates, self._inner = w, (rz[..., :size], rz[..., size:], n), inner
        self._before, self.out = before[:-1], before[1:]
        self.leaving = [before[-1]]

    def backward(self, above: Tensor | None, gradients: list[Tensor]) -> Entering:
        """Backpropagate; the arguments are those of `LstmPass.backward`.

        The reset gate multiplies inside the candidate, so (d_r, d_z, r * d_n) goes through the
        recurrent weights, and z passes the state on beside them.
        """
        w, (r, z, n) = self.w, self._gates
        (gh,) = gradients
        to_n = (1 - z) * (1 - n**2)
        # Factors from the gradient of h_t to that of each gate.
        factors = torch.stack(
            [to_n * self._inner * r * (1 - r), (self._before - n) * z * (1 - z), to_n], dim=2
        )
        recurrent = factors.clone()
        recurrent[:, :, 2] *= r
        flat = recurrent.flatten(2)
        leaving, enter = torch.empty_like(self._before), torch.empty_like(self._before)
        for t in reversed(range(len(flat))):
            if above is not None:
                gh = gh + above[t]
            leaving[t] = gh
            recurrent[t].mul_(gh[:, None])
            gh = torch.addmm(gh * z[t], flat[t], w.hh, out=enter[t])
        return [enter], (leaving[:, :, None] * factors).flatten(2)


class RnnPass:
    """One simple layer over all steps; see `LstmPass`."""

    def __init__(self, w: Weights, x: Tensor, state: list[Tensor], relu: bool) -> None:
        (h,) = state
        self.w, self._relu = w, relu
        self.out = _from_inputs(w, x, both_biases=True)
        recurrent = w.hh.t()
        for now in self.out:
            now.addmm_(h, recurrent)
            h = now.relu_() if relu else now.tanh_()
        self.leaving = [h]

    def backward(self, above: Tensor | None, gradients: list[Tensor]) -> Entering:
        """Backpropagate; the arguments are those of `LstmPass.backward`."""
        (gh,) = gradients
        delta = (self.out > 0).to(self.out.dtype) if self._relu else 1 - self.out**2
        enter = torch.empty_like(self.out)
        for t in reversed(range(len(self.out))):
            if above is not None:
                gh = gh + above[t]
            gh = torch.mm(delta[t].mul_(gh), self.w.hh, out=enter[t])
        return [enter], delta


SublayerPass = LstmPass | GruPass | RnnPass


def run_sublayer(layer: nn.RNNBase, index: int, x: Tensor, state: list[Tensor]) -> SublayerPass:
    """Run layer `index` of a stack."""
    w = weights_of(layer, index)
    if isinstance(layer, nn.LSTM):
        return LstmPass(w, x, state)
    if isinstance(layer, nn.GRU):
        return GruPass(w, x, state)
    return RnnPass(w, x, state, relu=layer.nonlinearity == "relu")
