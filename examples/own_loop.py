"""An ordinary PyTorch training loop with adaptive truncation in it.

The model, the optimiser and the loop stay yours. Run it with
`python examples/own_loop.py [--epochs N]`.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import adaptive_tbptt as at


class DelayedSum(nn.Module):
    """A GRU; the target is the sum of its inputs 3 and 8 steps ago."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.gru = nn.GRU(1, hidden)
        self.readout = nn.Linear(hidden, 1)

    def forward(self, inputs: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run over time; `None` is the initial state."""
        features, state = self.gru(inputs, state)
        return self.readout(features), state


def main() -> None:
    """Train and show how K follows what the model has learnt."""
    parser = argparse.ArgumentParser(description="An ordinary loop with adaptive truncation.")
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(2000, 32, 1)
    targets = torch.roll(inputs, 3, dims=0) + torch.roll(inputs, 8, dims=0)
    stream = at.SequenceStream(inputs, targets)

    model = DelayedSum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    loss_fn = nn.MSELoss()

    # An update every 10 steps, as in a loop that detaches every 10 steps. The context before each
    # window keeps the bias of the gradient below a tenth.
    tbptt = at.AdaptiveTBPTT(model, loss_fn, 0.1, losses=10)
    for epoch in range(options.epochs):
        for window in tbptt.windows(stream):
            loss = window.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch + 1:2d}  loss {loss.item():.4f}  K {tbptt.k}", flush=True)
    for estimate in tbptt.history[-1:]:
        print(estimate.message)


if __name__ == "__main__":
    main()
