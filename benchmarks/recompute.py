"""Peak memory and time of a long window that is held, and of one that runs again in pieces.

An LSTM with 256 units and a batch of 64 over a window of 2,000 steps. Every line is a process of
its own. The table is in `benchmarks/results/recompute/README.md`.

    python benchmarks/recompute.py --out benchmarks/results/recompute
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

import adaptive_tbptt as at
from adaptive_tbptt._torch.number_formats import flushed_denormals
from adaptive_tbptt.diagnosis.sampling import as_stream
from adaptive_tbptt.diagnosis.window_memory import window_memory
from adaptive_tbptt.train.provenance import commit
from memory import held, peak
from timing_tables import machine

INPUTS, UNITS, OUTPUTS, ROWS = 32, 256, 8, 64


class Model(nn.Module):
    """An LSTM and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.readout = nn.LSTM(INPUTS, UNITS), nn.Linear(UNITS, OUTPUTS)

    def core(self, inputs: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, object]:
        """Carry the state."""
        return self.lstm(inputs, state)

    def head(self, features: Tensor) -> Tensor:
        """Read it out."""
        outputs: Tensor = self.readout(features)
        return outputs


def one_window(steps: int, losses: int, recompute: int | None, gradients: Path) -> dict[str, float]:
    """Backpropagate one window twice; return its peak, what was forecast, and the faster time."""
    torch.manual_seed(0)
    model, loss_fn = Model(), nn.functional.mse_loss
    x, y = torch.randn(steps, ROWS, INPUTS), torch.randn(steps, ROWS, OUTPUTS)
    objective = at.model.Objective.of(model, loss_fn)
    source = at.diagnosis.Sampling(burn_in=0).source(
        objective, as_stream((x[:100], y[:100]), objective.recurrent)
    )
    forecast = replace(window_memory(source, 20), losses=losses)
    before, seconds = held(), []
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(1)
        tbptt = at.AdaptiveTBPTT(
            model, loss_fn, at.FixedTruncation(steps), losses=losses, recompute=recompute
        )
        stream = at.SequenceStream(x, y)
        tbptt._prepared = True  # its checks would count as the window's time
        stream.cursor = steps - losses
        tbptt._carried.begin(0, None)
        (window,) = tbptt.windows(stream)
        began = time.process_time()
        window.backward()
        seconds.append(time.process_time() - began)
    torch.save([p.grad for p in model.parameters()], gradients)
    return {
        "peak": peak() - before,
        "forecast": forecast.held(steps, recompute),
        "seconds": min(seconds),
    }


def in_a_process(folder: Path, *options: int) -> dict[str, float]:
    """Run a window in a process of its own."""
    command = [sys.executable, __file__, "--only", *map(str, options)]
    command.append(str(folder / f"{options[2]}.pt"))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def difference(ours: Path, theirs: Path) -> float:
    """Return the largest difference of two gradients, relative to the largest entry."""
    a, b = (torch.cat([g.flatten() for g in torch.load(path)]) for path in (ours, theirs))
    return float((a - b).abs().max() / b.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--losses", type=int, nargs="+", default=[2000, 35])
    parser.add_argument("--recompute", type=int, nargs="+", default=[200, 50, 10])
    parser.add_argument("--out", type=Path, help="folder for README.md")
    parser.add_argument("--only", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        steps, losses, recompute, path = options.only
        with flushed_denormals():
            found = one_window(int(steps), int(losses), int(recompute) or None, Path(path))
        print(json.dumps(found))
        return
    lines = [
        "| losses | context | `recompute` | peak, MiB | forecast, MiB | time | gradient changes |",
        "|---|---|---|---|---|---|---|",
    ]
    whole: dict[str, float] = {}
    for losses in options.losses:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for recompute in (0, *options.recompute):
                found = in_a_process(folder, options.steps, losses, recompute)
                whole = whole if recompute else found
                change = difference(folder / f"{recompute}.pt", folder / "0.pt")
                lines.append(
                    f"| {losses} | {options.steps - losses} | {recompute or 'None: held'} | "
                    f"{found['peak'] / 2**20:,.0f} | {found['forecast'] / 2**20:,.0f} | "
                    f"{found['seconds'] / whole['seconds']:.2f} x | "
                    f"{f'{change:.0e}' if recompute else ''} |"
                )
                print(lines[-1], f"{found['seconds']:.1f} s", flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        title = (
            f"A window of {options.steps:,} steps: LSTM with {UNITS} units, batch of {ROWS}, "
            "float32. The peak is that of the process, above what it held before the window."
        )
        made = f"{machine()}, commit {commit()}"
        (options.out / "README.md").write_text("\n".join([title, "", *lines, "", made]) + "\n")


if __name__ == "__main__":
    main()
