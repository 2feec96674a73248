"""Sequences of different lengths with static inputs: rivers that remember rain for a while.

Every catchment has records of its own length, and attributes that do not change: how long it stores
water, and its area. Run it with `python examples/sequences.py [--epochs N]`.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import adaptive_tbptt as at

State = tuple[Tensor, Tensor]


def catchment(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return rain and flow, `(days, 1)`, and the attributes, `(2,)`."""
    days = int(torch.randint(100, 600, (1,), generator=generator))
    storage, area = torch.rand(2, generator=generator).tolist()
    rain = 10 * torch.rand(days, 1, generator=generator) ** 8
    keep, water = 0.5 + 0.45 * storage, torch.zeros(1)
    flow = []
    for today in rain:
        water = keep * water + today
        flow.append((1 - keep) * (1 + area) * water)
    return rain, torch.stack(flow), torch.tensor([storage, area])


class Runoff(nn.Module):
    """An LSTM that sees rain and attributes at every step."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.lstm, self.readout = nn.LSTM(1 + 2, hidden), nn.Linear(hidden, 1)

    def forward(self, inputs: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Run over time; `None` is the initial state."""
        features, state = self.lstm(inputs, state)
        return self.readout(features), state


def main() -> None:
    """Train on forty catchments; validate on ten others."""
    parser = argparse.ArgumentParser(description="Sequences of different lengths.")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()

    generator = torch.Generator().manual_seed(0)
    catchments = [catchment(generator) for _ in range(50)]
    train = at.SequenceStream.from_sequences(catchments[:40], rows=8, shuffle=True)
    valid = at.SequenceStream.from_sequences(catchments[40:], rows=5)
    steps = sum(len(rain) for rain, _, _ in catchments[:40])
    print(f"{steps} days in {train.rows} rows of {train.length}: ", end="")
    print(f"{1 - steps / (train.rows * train.length):.1%} padding")

    torch.manual_seed(0)
    model, loss_fn = Runoff(), nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    tbptt = at.AdaptiveTBPTT(model, loss_fn, at.BiasTolerance(0.1, k_max=64, lags=64), losses=20)
    for epoch in range(options.epochs):
        for window in tbptt.windows(train):
            window.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        loss = at.evaluate(model, loss_fn, valid)
        print(f"epoch {epoch + 1:2d}  validation loss {loss:.4f}  K {tbptt.k}", flush=True)


if __name__ == "__main__":
    main()
