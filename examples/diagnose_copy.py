"""How much of the gradient does a loop miss on the copy task? Train an LSTM a little, then ask.

Run it with `python examples/diagnose_copy.py [--steps N] [--out FOLDER]`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import adaptive_tbptt as at

SYMBOLS, MEMORY, ROWS = 6, 10, 64


def copy_stream(blocks: int, generator: torch.Generator) -> at.SequenceStream:
    """Marker 1, data symbols 2..5, blanks 0; the output repeats the first half after m steps."""
    data = torch.randint(2, SYMBOLS, (blocks, MEMORY, ROWS), generator=generator)
    data[:, 0] = 1
    blank = torch.zeros_like(data)
    symbols = torch.cat([data, blank], dim=1).flatten(0, 1)
    answers = torch.cat([blank, data], dim=1).flatten(0, 1)
    return at.SequenceStream(symbols, answers)


class CopyModel(nn.Module):
    """Embedding, LSTM, readout; core and head apart so that lag 0 is measured too."""

    def __init__(self, hidden: int = 50) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, SYMBOLS)
        self.lstm = nn.LSTM(SYMBOLS, hidden)
        self.readout = nn.Linear(hidden, SYMBOLS)

    def core(
        self, symbols: Tensor, state: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Carry the state."""
        features, state = self.lstm(self.embedding(symbols), state)
        return features, state

    def head(self, features: Tensor) -> Tensor:
        """Read the state out."""
        logits: Tensor = self.readout(features)
        return logits


def loss_fn(logits: Tensor, answers: Tensor) -> Tensor:
    """Cross entropy, the mean over time and batch."""
    return F.cross_entropy(logits.flatten(0, 1), answers.flatten())


def main() -> None:
    """Train, diagnose, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--steps", type=int, default=600, help="training steps before the diagnosis"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/diagnose-copy"), help="output folder"
    )
    options = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    stream = copy_stream(200, generator)
    model = CopyModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(options.steps):
        symbols, answers, *_ = stream.random_segment(4 * MEMORY, generator)
        loss = loss_fn(model.head(model.core(symbols, None)[0]), answers)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == options.steps - 1:
            print(f"step {step:4d}  perplexity {loss.exp().item():.3f}", flush=True)

    report = at.diagnose(model, loss_fn, stream, losses=MEMORY, lags=100)
    print(f"\n{report}\n")
    report.figure(options.out / "bias.png")
    print(f"bias against context and cost: {options.out / 'bias.png'}")


if __name__ == "__main__":
    main()
