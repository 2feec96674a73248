"""Sufficient conditions for a contraction: Miller and Hardt (2019)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def contraction(module: nn.Module, largest: dict[nn.Module, float]) -> tuple[bool | None, str]:
    """Check the known sufficient conditions of Miller and Hardt, layer by layer.

    Simple RNN: ||W||_2 < 1, tanh and ReLU being 1-Lipschitz. LSTM, in the infinity norm:
    ||W_i||, ||W_o|| < 1 - f, ||W_z|| <= (1 - f) / 4 and ||W_f|| < (1 - f)^2, where f bounds the
    forget gate for inputs no larger than those observed; then a few steps together contract.

    Args:
        module: the user's module; every RNN and LSTM in it is looked at.
        largest: the largest |x| that each of them was given.
    """
    found: list[tuple[bool, str]] = []
    for name, part in module.named_modules():
        label = f"'{name}' " if name else ""
        for suffix in layer_suffixes(part):
            if isinstance(part, nn.RNN | nn.RNNCell):
                norm = float(torch.linalg.matrix_norm(_weights(part, f"weight_hh{suffix}"), 2))
                found.append((norm < 1.0, f"{label}||W{suffix}||={norm:.3g}"))
            elif isinstance(part, nn.LSTM | nn.LSTMCell) and not getattr(part, "proj_size", 0):
                # An upper layer reads h of the one below, which is smaller than 1.
                bound = largest.get(part, float("inf")) if suffix in ("", "_l0") else 1.0
                found.append(_lstm_condition(part, suffix, bound, label))
            else:
                return None, f"no sufficient condition is known for {type(part).__name__}"
    if not found:
        return None, f"no sufficient condition is known for {type(module).__name__}"
    return all(ok for ok, _ in found), "; ".join(text for _, text in found)


def _lstm_condition(part: nn.Module, suffix: str, largest: float, label: str) -> tuple[bool, str]:
    w_i, w_f, w_z, w_o = _weights(part, f"weight_hh{suffix}").chunk(4)
    reach = w_f.abs().sum(dim=1)
    reach += largest * _weights(part, f"weight_ih{suffix}").chunk(4)[1].abs().sum(dim=1)
    if getattr(part, "bias", False) is not False:
        for bias in (f"bias_ih{suffix}", f"bias_hh{suffix}"):
            reach += _weights(part, bias).chunk(4)[1]
    gap = 1.0 - float(torch.sigmoid(reach.max()))
    i, f, z, o = (float(w.abs().sum(dim=1).max()) for w in (w_i, w_f, w_z, w_o))
    ok = i < gap and o < gap and z <= gap / 4 and f < gap**2
    return ok, (
        f"{label}layer{suffix}: forget gate up to {1 - gap:.3g}, ||W_i||={i:.3g}, "
        f"||W_f||={f:.3g}, ||W_z||={z:.3g}, ||W_o||={o:.3g}"
    )


def _weights(part: nn.Module, name: str) -> Tensor:
    """Return a parameter in float64, on the CPU: not every device has such numbers."""
    weights: Tensor = getattr(part, name)
    return weights.detach().cpu().double()


def layer_suffixes(part: nn.Module) -> list[str]:
    """Return how the parameters of each layer end: `_l0`, ...; nothing for other modules."""
    if isinstance(part, nn.RNNBase):
        return [f"_l{i}" for i in range(part.num_layers)]
    return [""] if isinstance(part, nn.RNNCellBase) else []


@contextmanager
def largest_inputs(module: nn.Module) -> Iterator[dict[nn.Module, float]]:
    """Note the largest |x| given to each recurrent part while the block runs."""
    largest: dict[nn.Module, float] = {}

    def note(part: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        x = args[0] if args else named["input"]
        largest[part] = max(largest.get(part, 0.0), float(x.abs().max()))

    handles = [
        m.register_forward_pre_hook(note, with_kwargs=True)
        for m in module.modules()
        if layer_suffixes(m)
    ]
    try:
        yield largest
    finally:
        for handle in handles:
            handle.remove()
