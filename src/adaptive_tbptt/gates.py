"""Backpropagation through `nn.LSTM`, `nn.GRU` and `nn.RNN` by hand, every lag at once.

Autograd on a layer returns the gradient of its first state only; one call per step would return
all of them, at four to seven times the cost. Here the gates of all steps are recomputed in one
large product, everything elementwise is prepared for all steps together, and what is left of a
step backwards is one small product with the recurrent weights. No weight gradient is formed.
"""

from __future__ import annotations

from typing import NamedTuple

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


class Entering(NamedTuple):
    """Gradients with respect to the state that enters each step, and to the inputs of each step.

    Attributes:
        h: `(steps, rows, hidden)`.
        c: the same for the cell state of an LSTM.
        x: `(steps, rows, inputs)`.
    """

    h: Tensor
    c: Tensor | None
    x: Tensor


def weights_of(layer: nn.RNNBase, index: int) -> Weights:
    """Return the parameters of layer `index`, detached."""

    def get(name: str) -> Tensor | None:
        value = getattr(layer, f"{name}_l{index}", None)
        return None if value is None else value.detach()

    ih, hh = get("weight_ih"), get("weight_hh")
    assert ih is not None
    assert hh is not None
    return Weights(ih, hh, get("bias_ih"), get("bias_hh"), get("weight_hr"))


def lstm_backward(
    w: Weights,
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    out: Tensor,
    above: Tensor | None,
    gh: Tensor,
    gc: Tensor,
) -> Entering:
    """Backpropagate through one LSTM layer.

    Args:
        w: its parameters.
        x: `(steps, rows, inputs)`.
        h0: `(rows, projected)` state entering the first step; `c0` likewise.
        c0: `(rows, hidden)`.
        out: `(steps, rows, projected)`, its outputs.
        above: gradient with respect to `out` from the layer above, or None.
        gh: gradient with respect to the last h; `gc` likewise.
        gc: gradient with respect to the last c.
    """
    steps, rows, _ = x.shape
    before = torch.cat([h0[None], out[:-1]])
    gates = F.linear(x, w.ih, w.b_ih) + F.linear(before, w.hh, w.b_hh)
    i, f, g, o = gates.view(steps, rows, 4, -1).unbind(2)
    i, f, o, g = torch.sigmoid(i), torch.sigmoid(f), torch.sigmoid(o), torch.tanh(g)
    cells = torch.empty(steps + 1, *c0.shape, dtype=c0.dtype, device=c0.device)
    cells[0] = c0
    new = i * g
    for t in range(steps):
        torch.addcmul(new[t], f[t], cells[t], out=cells[t + 1])
    squashed = torch.tanh(cells[1:])
    to_cell = o * (1 - squashed**2)
    to_o = squashed * o * (1 - o)
    to_ifg = torch.stack([g * i * (1 - i), cells[:-1] * f * (1 - f), i * (1 - g**2)], dim=2)
    delta = torch.empty(steps, rows, 4, c0.shape[-1], dtype=x.dtype, device=x.device)
    enter_h, enter_c = torch.empty_like(before), torch.empty_like(new)
    for t in reversed(range(steps)):
        if above is not None:
            gh = gh + above[t]
        gy = gh if w.hr is None else gh @ w.hr
        dc = torch.addcmul(gc, gy, to_cell[t])
        torch.mul(dc[:, None], to_ifg[t], out=delta[t, :, :3])
        torch.mul(gy, to_o[t], out=delta[t, :, 3])
        gc = torch.mul(dc, f[t], out=enter_c[t])
        gh = torch.mm(delta[t].flatten(1), w.hh, out=enter_h[t])
    return Entering(enter_h, enter_c, delta.flatten(2) @ w.ih)


def gru_backward(
    w: Weights, x: Tensor, h0: Tensor, out: Tensor, above: Tensor | None, gh: Tensor
) -> Entering:
    """Backpropagate through one GRU layer; arguments as in `lstm_backward`.

    The reset gate multiplies inside the candidate, so what goes through the recurrent weights is
    (d_r, d_z, r * d_n), and z passes the state on beside them.
    """
    steps, rows, _ = x.shape
    before = torch.cat([h0[None], out[:-1]])
    from_x = F.linear(x, w.ih, w.b_ih).view(steps, rows, 3, -1)
    from_h = F.linear(before, w.hh, w.b_hh).view(steps, rows, 3, -1)
    r, z = torch.sigmoid(from_x[:, :, :2] + from_h[:, :, :2]).unbind(2)
    inner = from_h[:, :, 2]
    n = torch.tanh(from_x[:, :, 2] + r * inner)
    to_n = (1 - z) * (1 - n**2)
    # How each gate's part of delta follows from the gradient of h_t.
    factors = torch.stack([to_n * inner * r * (1 - r), (before - n) * z * (1 - z), to_n], dim=2)
    recurrent = factors.clone()
    recurrent[:, :, 2] *= r
    grads, enter = torch.empty_like(before), torch.empty_like(before)
    for t in reversed(range(steps)):
        if above is not None:
            gh = gh + above[t]
        grads[t] = gh
        torch.addmm(gh * z[t], (gh[:, None] * recurrent[t]).flatten(1), w.hh, out=enter[t])
        gh = enter[t]
    return Entering(enter, None, (grads[:, :, None] * factors).flatten(2) @ w.ih)


def rnn_backward(
    w: Weights, relu: bool, h0: Tensor, out: Tensor, above: Tensor | None, gh: Tensor
) -> Entering:
    """Backpropagate through one simple layer; arguments as in `lstm_backward`."""
    slope = (out > 0).to(out.dtype) if relu else 1 - out**2
    delta, enter = torch.empty_like(out), torch.empty_like(out)
    for t in reversed(range(len(out))):
        if above is not None:
            gh = gh + above[t]
        torch.mul(gh, slope[t], out=delta[t])
        gh = torch.mm(delta[t], w.hh, out=enter[t])
    return Entering(enter, None, delta @ w.ih)
