"""torch.compile and a K that changes: rounded to buckets, so that windows come in few shapes.

Run it with `python examples/compiled.py [--epochs N] [--backend inductor]`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import adaptive_tbptt as at


class LeakyUnits(nn.Module):
    """A recurrence in plain PyTorch, the kind that a compiler speeds up."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.from_inputs = nn.Linear(inputs, 2 * hidden)
        self.from_state = nn.Linear(hidden, 2 * hidden, bias=False)
        self.readout = nn.Linear(hidden, 1)

    def core(self, inputs: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Carry the state: h_t = (1 - z_t) h_{t-1} + z_t tanh(...)."""
        seen: list[Tensor] = []
        drive = self.from_inputs(inputs)
        hidden = inputs.new_zeros(inputs.shape[1], drive.shape[-1] // 2)
        hidden = hidden if state is None else state
        for now in drive:
            gate, candidate = (now + self.from_state(hidden)).chunk(2, dim=-1)
            hidden = torch.lerp(hidden, torch.tanh(candidate), torch.sigmoid(gate))
            seen.append(hidden)
        return torch.stack(seen), hidden

    def head(self, features: Tensor) -> Tensor:
        """Read the state out."""
        outputs: Tensor = self.readout(features)
        return outputs


def main() -> None:
    """Train, and count what was compiled."""
    parser = argparse.ArgumentParser(description="torch.compile with adaptive truncation.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(1000, 32, 1)
    targets = torch.roll(inputs, 2, dims=0) + torch.roll(inputs, 5, dims=0)
    stream = at.SequenceStream(inputs, targets)

    units = LeakyUnits(1, 32)
    model: Any = torch.compile(units, backend=options.backend)
    optimizer = torch.optim.Adam(units.parameters(), lr=1e-2)
    # Every K is a shape of its own, and compiled once. Two buckets keep the number of graphs small:
    # three per bucket at most, and torch keeps eight per function before it gives up.
    controller = at.truncate.Bucketed(
        at.BiasTolerance(delta=0.1, k_max=16, lags=40), buckets=(8, 16)
    )
    tbptt = at.AdaptiveTBPTT(model, nn.MSELoss(), controller)
    for epoch in range(options.epochs):
        for window in tbptt.windows(stream):
            loss = window.backward()
            optimizer.step()
            optimizer.zero_grad()
        graphs = counters["stats"]["unique_graphs"]
        print(f"epoch {epoch + 1}  loss {loss:.4f}  K {tbptt.k}  graphs {graphs}", flush=True)


if __name__ == "__main__":
    main()
