"""How many days of weather does a rainfall-runoff model need? Train an LSTM a little, then ask.

In a catchment, water runs off the surface within days, through the soil within weeks, and as
groundwater within months. Many hydrologists read 365 days for every prediction (`seq_length=365`).
Run it with `python examples/rainfall_runoff.py [--epochs N] [--out FOLDER]`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import adaptive_tbptt as at

DECAYS = torch.exp(-1 / torch.tensor([2.0, 12.0, 60.0]))  # stores that empty within so many days
YEAR = 365
SHARES = torch.tensor([0.6, 0.5, 0.5])  # of each store in the runoff


def catchments(days: int, rows: int, generator: torch.Generator) -> at.SequenceStream:
    """Rain on a third of all days, and the runoff of three stores; every row is a catchment."""
    wet = torch.rand(days, rows, generator=generator) < 1 / 3
    depth = -torch.rand(days, rows, generator=generator).clamp_min(1e-6).log()
    rain = wet * depth
    stores, runoff = torch.zeros(rows, 3), []
    for today in rain:
        stores = DECAYS * stores + (1 - DECAYS**2).sqrt() * (today[:, None] - 1 / 3)
        runoff.append(stores @ SHARES)
    noise = 0.2 * torch.randn(days, rows, generator=generator)
    return at.SequenceStream(rain[..., None], (torch.stack(runoff) + noise)[..., None])


class RainfallRunoff(nn.Module):
    """An LSTM and a readout."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.lstm, self.readout = nn.LSTM(1, hidden), nn.Linear(hidden, 1)
        with torch.no_grad():  # chrono initialisation: memories of 1 to 60 days
            forget = torch.linspace(1.0, 60.0, hidden).log()
            bias = self.lstm.get_parameter("bias_hh_l0")  # input, forget, cell and output gates
            bias[:hidden], bias[hidden : 2 * hidden] = -forget, forget

    def forward(
        self, rain: Tensor, state: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run over time; `None` is the initial state."""
        features, state = self.lstm(rain, state)
        return self.readout(features), state


def loss_after(model: nn.Module, stream: at.SequenceStream, days: int) -> float:
    """Return the loss if the model starts anew for each prediction and reads so many days.

    The predictions are the same for every number of days: each 16th day after the second year.
    """
    rain, runoff, *_ = stream.segment(0, len(stream))
    windows = rain[2 * YEAR - days :].unfold(0, days, 16)  # (windows, rows, 1, days)
    with torch.no_grad():
        outputs, _ = model(windows.permute(3, 0, 1, 2).flatten(1, 2), None)
    targets = runoff[2 * YEAR - 1 :: 16].flatten(0, 1)
    return float(nn.functional.mse_loss(outputs[-1], targets))


def main() -> None:
    """Train, look back, and check the answer on catchments that were not used for either."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("runs/rainfall-runoff"))
    options = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    train, valid, test = (catchments(4 * YEAR, 32, generator) for _ in range(3))
    model, loss_fn = RainfallRunoff(), nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    tbptt = at.AdaptiveTBPTT(model, loss_fn, at.FixedTruncation(60), losses=60)
    for epoch in range(options.epochs):
        for window in tbptt.windows(train):
            window.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        print(f"epoch {epoch + 1:2d}  loss {at.evaluate(model, loss_fn, valid):.5f}", flush=True)

    report = at.lookback(model, loss_fn, valid)
    print(f"\n{report}\n")
    report.figure(options.out / "lookback.png")
    full = loss_after(model, test, 2 * YEAR)
    for days in (report.steps, report.loss_steps):
        if days is not None:
            loss = loss_after(model, test, days)
            print(
                f"other catchments: loss {loss:.5f} after {days} days, {full:.5f} after "
                f"{2 * YEAR}, {loss / full - 1:+.1%}"
            )

    gradient = at.diagnose(model, loss_fn, train, losses=60, segments=24, show=False)
    print(f"\nthe gradient of the training loop, for comparison:\n{gradient}")


if __name__ == "__main__":
    main()
