"""A loop of your own on several processes: the rows are split over them, and all use the same K.

    torchrun --nproc-per-node 2 examples/distributed.py

Started with plain `python` it trains alone, to the same numbers. Compared with `own_loop.py` there
is a process group around it, and the first process speaks. Every process passes the whole stream;
`windows` gives it its share of the rows, and `backward` averages gradient and loss over all.
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


def train(epochs: int, device: str) -> None:
    """Train; the first process prints."""
    torch.manual_seed(0)
    inputs = torch.randn(2000, 32, 1)
    targets = torch.roll(inputs, 3, dims=0) + torch.roll(inputs, 8, dims=0)
    stream = at.SequenceStream(inputs, targets)
    model = DelayedSum().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    control = at.BiasTolerance(delta=0.1, k_max=50, lags=60)
    tbptt = at.AdaptiveTBPTT(model, nn.MSELoss(), control, losses=20)
    scale = at.StepScale(optimizer)
    for epoch in range(epochs):
        for window in tbptt.windows(stream):
            loss = window.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scale.step(window)
            optimizer.step()
            optimizer.zero_grad()
        if tbptt.ranks.leads:
            print(f"epoch {epoch + 1:2d}  loss {loss.item():.4f}  K {tbptt.k}", flush=True)


def main() -> None:
    """Join the other processes, if `torchrun` started any, and train."""
    parser = argparse.ArgumentParser(description="An own loop on several processes.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for one GPU per process")
    options = parser.parse_args()
    with at.distributed.process_group(options.device) as device:
        train(options.epochs, device)


if __name__ == "__main__":
    main()
