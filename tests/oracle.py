"""Slow twins: the same quantities by brute force, one autograd call per lag and row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import adaptive_tbptt as at
from adaptive_tbptt.data.nest import leaves, map_leaves

Run = Callable[[Any, Any], tuple[Any, Any]]


def entering_norms(
    run: Run, loss_of_row: Callable[[Any, int], Tensor], inputs: Any, state: Any, rows: int
) -> np.ndarray:
    """phi_k for k = 1..steps: rerun from the state entering step s-k+1, as a variable of its own.

    `run(inputs, state)` runs one or more steps; `loss_of_row(outputs, row)` is L_s of that row.
    """
    steps = leaves(inputs)[0].shape[0]
    entering = [state]
    for t in range(steps - 1):
        entering.append(run(map_leaves(lambda x, t=t: x[t : t + 1], inputs), entering[-1])[1])
    norms = np.zeros((steps, rows))
    for k in range(1, steps + 1):
        start = map_leaves(
            lambda x: x.detach().clone().requires_grad_(x.is_floating_point()), entering[steps - k]
        )
        variables = [x for x in leaves(start) if x.requires_grad]
        state = start
        for t in range(steps - k, steps):
            outputs, state = run(map_leaves(lambda x, t=t: x[t : t + 1], inputs), state)
        for row in range(rows):
            gradients = torch.autograd.grad(
                loss_of_row(outputs, row), variables, retain_graph=True, allow_unused=True
            )
            norms[k - 1, row] = np.sqrt(
                sum(float((g**2).sum()) for g in gradients if g is not None)
            )
    return norms


class DictState(nn.Module):
    """A custom module: two stacked leaky cells, a dict state, a counter, outputs flattened."""

    def __init__(self, inputs: int = 3, hidden: int = 4, outputs: int = 2) -> None:
        super().__init__()
        self.low = nn.Linear(inputs + hidden, hidden)
        self.high = nn.Linear(2 * hidden, hidden)
        self.out = nn.Linear(hidden, outputs)
        self.hidden = hidden

    def forward(self, x: Tensor, state: dict[str, Any] | None) -> tuple[Tensor, dict[str, Any]]:
        if state is None:
            zero = x.new_zeros(x.shape[1], self.hidden)
            state = {
                "low": zero,
                "high": [zero],
                "count": torch.zeros(x.shape[1], dtype=torch.long),
            }
        low, high, count = state["low"], state["high"][0], state["count"]
        outputs = []
        for xt in x:
            low = torch.tanh(self.low(torch.cat([xt, low], -1))) + 0.3 * low
            high = torch.tanh(self.high(torch.cat([low, high], -1)))
            count = count + 1
            outputs.append(self.out(high))
        return torch.cat(outputs), {"low": low, "high": [high], "count": count}


class CoreHead(nn.Module):
    """A module that exposes core and head."""

    def __init__(self, layer: nn.Module, features: int, outputs: int = 2) -> None:
        super().__init__()
        self.layer = layer
        self.readout = nn.Sequential(nn.Tanh(), nn.Linear(features, outputs))
        self.head_calls = 0

    def core(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.layer(x, state)

    def head(self, features: Tensor) -> Tensor:
        self.head_calls += 1
        return self.readout(features)

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        features, state = self.core(x, state)
        return self.head(features), state


class LinearRNN(nn.Module):
    """h_t = W h_{t-1} + U x_t, or 0 where x's last feature says reset; the readout is h itself."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def core(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        h = x.new_zeros(x.shape[1], len(self.weight)) if state is None else state
        seen = []
        for xt in x:
            keep = 1.0 - xt[:, -1:]
            h = keep * (h @ self.weight.T + xt[:, :-1])
            seen.append(h)
        return torch.stack(seen), h

    def head(self, features: Tensor) -> Tensor:
        return features

    def forward(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.core(x, state)


def along(v: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss <v, h_s>, mean over rows: dL_s/dh_s = v exactly."""
    return lambda outputs, targets: (outputs @ v).mean()


class Scripted(at.truncate.Controller):
    """Goes through a list of truncation lengths, one per estimate; asks for tiny probes."""

    def __init__(self, ks: list[int]) -> None:
        self.ks = ks

    k_max = property(lambda self: max(self.ks))

    def request(
        self, state: at.truncate.TruncationState, losses: int | None
    ) -> at.measure.LagRequest:
        return at.measure.LagRequest(lags=2)

    def init(self) -> at.truncate.TruncationState:
        return at.truncate.TruncationState(self.ks[0], memory=(1.0,))

    def update(
        self, state: at.truncate.TruncationState, evidence: at.measure.Evidence
    ) -> at.truncate.TruncationState:
        index = int(state.memory[0])
        k = self.ks[min(index, len(self.ks) - 1)]
        return at.truncate.TruncationState(k, memory=(index + 1.0,))

    def context(self, state, losses, step):
        return at.truncate.Context(state.known_k)

    def assess(self, state: at.truncate.TruncationState, k: int) -> None:
        return None

    def brief(
        self, state: at.truncate.TruncationState, evidence: at.measure.Evidence
    ) -> dict[str, Any]:
        return {}


def lag_gradients(
    model: nn.Module, loss_of_step: Callable[[Any, int], Tensor], x: Tensor
) -> list[list[dict[str, Tensor]]]:
    """[s][j]: gradient of the loss of step s with respect to the parameters used at step j.

    Every step runs with a copy of the parameters of its own, so nothing is truncated by detaching.
    """
    names = dict(model.named_parameters())
    copies = [{n: p.detach().clone().requires_grad_() for n, p in names.items()} for _ in x]
    state, outputs = None, []
    for t in range(len(x)):
        out, state = torch.func.functional_call(model, copies[t], (x[t : t + 1], state))
        outputs.append(out)
    table = []
    for s, out in enumerate(outputs):
        flat = [copies[j][n] for j in range(s + 1) for n in names]
        found = iter(
            torch.autograd.grad(
                loss_of_step(out, s),
                flat,
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        )
        table.append([{n: next(found) for n in names} for _ in range(s + 1)])
    return table


def window_gradient(
    table: list[list[dict[str, Tensor]]], start: int, first: int, stop: int
) -> dict[str, Tensor]:
    """BPTT(stop - start, stop - first) by its definition (Eq. backprop)."""
    total = {n: torch.zeros_like(g) for n, g in table[0][0].items()}
    for s in range(first, stop):
        for j in range(start, s + 1):
            for n in total:
                total[n] += table[s][j][n] / (stop - first)
    return total
