"""Mixed precision: bfloat16 on a CPU, float16 and a GradScaler on a GPU, K chosen as usual.

Run it with `python examples/mixed_precision.py [--epochs N]`.
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
    """Train in mixed precision; K is estimated outside of autocast, in float32."""
    parser = argparse.ArgumentParser(description="Mixed precision with adaptive truncation.")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.bfloat16

    torch.manual_seed(0)
    inputs = torch.randn(2000, 32, 1)
    targets = torch.roll(inputs, 3, dims=0) + torch.roll(inputs, 8, dims=0)
    stream = at.SequenceStream(inputs, targets)

    model = DelayedSum().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)
    controller = at.BiasTolerance(delta=0.1, k_max=50, lags=60)
    tbptt = at.AdaptiveTBPTT(model, nn.MSELoss(), controller)
    scale = at.StepScale(optimizer)
    for epoch in range(options.epochs):
        for window in tbptt.windows(stream):
            with torch.autocast(device, dtype):
                loss = window.backward(scaler=scaler)  # .grad is scaled, the loss is not
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scale.step(window)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        print(f"epoch {epoch + 1:2d}  loss {loss.item():.4f}  K {tbptt.k}", flush=True)


if __name__ == "__main__":
    main()
