"""A gated linear recurrence (minGRU; RG-LRU, S5 and Mamba have the same form), and the K it needs.

h_t = (1 - z_t) h_{t-1} + z_t c_t, with z and c functions of the inputs alone, so all steps are
computed at once by an associative scan. The gradient of a loss with respect to the state decays
with the lag as the product of the gates (1 - z).

Run it with `python examples/gated_linear_recurrence.py [--epochs N]`.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import adaptive_tbptt as at

MARKED = 0.1  # fraction of the steps whose value is to be remembered


def scan(keep: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Solve h_t = keep_t h_{t-1} + new_t for all steps, in log2(time) rounds.

    Only products of gates and sums, so nothing overflows, and signs and formats do not matter.

    Returns:
        The product of `keep` up to every step, and h for a start at 0; both `(time, ...)`.
    """
    reach = 1  # steps that every h knows of
    while reach < len(keep):
        new = torch.cat([new[:reach], new[reach:] + keep[reach:] * new[:-reach]])
        keep = torch.cat([keep[:reach], keep[reach:] * keep[:-reach]])
        reach *= 2
    return keep, new


class MinGRU(nn.Module):
    """One layer of minGRU (Feng et al., 2024, 'Were RNNs all we needed?') and a readout."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.gate = nn.Linear(inputs, hidden)
        self.candidate = nn.Linear(inputs, hidden)
        self.readout = nn.Linear(hidden, outputs)

    def core(self, inputs: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Carry the state over `(time, batch, inputs)`."""
        gate = self.gate(inputs)
        # sigmoid(-x), not 1 - sigmoid(x): small gates keep their digits.
        kept, hidden = scan(torch.sigmoid(-gate), torch.sigmoid(gate) * self.candidate(inputs))
        if state is not None:
            hidden = hidden + kept * state
        return hidden, hidden[-1]

    def head(self, features: Tensor) -> Tensor:
        """Read the state out."""
        outputs: Tensor = self.readout(features)
        return outputs


def latch(steps: int, rows: int) -> at.SequenceStream:
    """Values, some of them marked; the output is the last marked value."""
    values, marks = torch.randn(steps, rows), torch.rand(steps, rows) < MARKED
    marks[0] = True
    held = [values[0]]
    for value, mark in zip(values[1:], marks[1:], strict=True):
        held.append(torch.where(mark, value, held[-1]))
    return at.SequenceStream(
        torch.stack([values, marks.float()], dim=-1), torch.stack(held)[..., None]
    )


def main() -> None:
    """Train adaptively, then diagnose."""
    parser = argparse.ArgumentParser(description="Which K does a gated linear recurrence need?")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()

    torch.manual_seed(0)
    stream = latch(2000, 32)
    model, loss_fn = MinGRU(2, 32, 1), nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    controller = at.BiasTolerance(delta=0.1, k_min=0, k_max=64, lags=80)
    tbptt = at.AdaptiveTBPTT(model, loss_fn, controller, losses=20)
    for epoch in range(options.epochs):
        for window in tbptt.windows(stream):
            loss = window.backward()
            optimizer.step()
            optimizer.zero_grad()
        estimate = tbptt.history[-1]
        print(
            f"epoch {epoch + 1:2d}  loss {loss.item():.4f}  K {estimate.k}  "
            f"bias {estimate.relative_bias:.3f}",
            flush=True,
        )
    print(f"\n{at.diagnose(model, loss_fn, stream, losses=20, lags=100)}")
    print(
        f"\nA value is replaced with probability {MARKED}: a perfect latch has beta {1 - MARKED}."
    )
    segment = stream.random_segment(100)
    profile = at.probe(model, loss_fn, segment.inputs, segment.targets)
    print(f"Measured: beta {at.fit_decay(profile.mean).beta:.3f}.")


if __name__ == "__main__":
    main()
