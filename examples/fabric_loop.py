"""Lightning Fabric with adaptive truncation: your own loop, Fabric's devices and precision.

Needs `pip install 'adaptive-tbptt[lightning]'`. Run it with
`python examples/fabric_loop.py [--epochs N] [--precision bf16-mixed] [--checkpoint FILE]`; with a
checkpoint it goes on where it stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from lightning.fabric import Fabric
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
    """Train, one checkpoint per epoch."""
    parser = argparse.ArgumentParser(description="A Fabric loop with adaptive truncation.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()

    fabric = Fabric(accelerator="cpu", devices=1, precision=options.precision)
    fabric.launch()
    fabric.seed_everything(0)
    inputs = torch.randn(2000, 32, 1)
    targets = torch.roll(inputs, 3, dims=0) + torch.roll(inputs, 8, dims=0)
    stream = at.SequenceStream(inputs, targets)

    model = DelayedSum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scale = at.StepScale(optimizer)  # before setup: it belongs to the optimiser itself
    model, optimizer = fabric.setup(model, optimizer)
    # The module itself: Fabric's wrapper allows no gradient but fabric.backward's, and an estimate
    # of K takes its own. So precision comes from fabric.autocast(), and estimates measure in full
    # precision.
    tbptt = at.AdaptiveTBPTT(
        model.module, nn.MSELoss(), at.BiasTolerance(delta=0.1, k_max=50, lags=60)
    )

    state = {"model": model, "optimizer": optimizer, "tbptt": tbptt, "epoch": 0}
    if options.checkpoint and options.checkpoint.exists():
        fabric.load(options.checkpoint, state)
    for epoch in range(int(state["epoch"]), options.epochs):
        for window in tbptt.windows(stream):
            with fabric.autocast():
                loss = window.loss()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            scale.step(window)
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch + 1:2d}  loss {loss.item():.4f}  K {tbptt.k}", flush=True)
        state["epoch"] = epoch + 1
        if options.checkpoint:
            fabric.save(options.checkpoint, state)


if __name__ == "__main__":
    main()
