"""State-space layers in plain PyTorch, state in and out, and the context each needs.

`LRU` is a diagonal state-space layer with a complex state (Orvieto et al., 2023; S4D and S5 have
the same recurrence). `Selective` is a block like Mamba's (Gu and Dao, 2023): its gates depend on
the inputs, and a short convolution carries its last inputs as a second part of the state. minGRU is
in `gated_linear_recurrence.py`.

Run it with `python examples/state_space.py [--epochs N]`.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import adaptive_tbptt as at

FADES = 0.95  # what the target remembers falls by this factor with every step


def scan(keep: Tensor, new: Tensor, state: Tensor, chunk: int = 64) -> tuple[Tensor, Tensor]:
    """Solve h_t = keep_t h_{t-1} + new_t: a chunk at a time, all steps of a chunk at once.

    Args:
        keep: `(time, ...)`, real or complex; it may broadcast against `new`.
        new: `(time, batch, ...)`.
        state: h before the first step. The gradient flows through it: that is 'dh0'.
        chunk: steps computed at once.

    Returns:
        h at every step, and the last h.
    """
    hidden = []
    for k, h in zip(keep.split(chunk), new.split(chunk), strict=True):
        reach = 1  # steps that every h knows of; it doubles in each round
        while reach < len(h):
            h = torch.cat([h[:reach], h[reach:] + k[reach:] * h[:-reach]])
            k = torch.cat([k[:reach], k[reach:] * k[:-reach]])
            reach *= 2
        hidden.append(h + k * state)
        state = hidden[-1][-1]
    return torch.cat(hidden), state


class LRU(nn.Module):
    """h_t = lambda h_{t-1} + gamma B x_t with a complex diagonal lambda, |lambda| < 1."""

    def __init__(self, inputs: int, units: int, outputs: int) -> None:
        super().__init__()
        radius, angle = torch.empty(units).uniform_(0.4, 0.99), torch.rand(units) * math.pi / 4
        self.log_decay = nn.Parameter(torch.log(-torch.log(radius)))
        self.log_angle = nn.Parameter(torch.log(angle))
        self.enter = nn.Linear(inputs, 2 * units)
        self.readout = nn.Linear(2 * units, outputs)

    def core(self, inputs: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Carry the complex `(batch, units)` state over `(time, batch, inputs)`."""
        radius = torch.exp(-torch.exp(self.log_decay))
        keep = torch.polar(radius, torch.exp(self.log_angle))
        real, imaginary = self.enter(inputs).chunk(2, dim=-1)
        new = torch.sqrt(1 - radius**2) * torch.complex(real, imaginary)
        state = torch.zeros_like(new[0]) if state is None else state
        hidden, state = scan(keep.expand(len(new), 1, -1), new, state)
        return torch.cat([hidden.real, hidden.imag], dim=-1), state

    def head(self, features: Tensor) -> Tensor:
        """Read the state out."""
        outputs: Tensor = self.readout(features)
        return outputs


class Selective(nn.Module):
    """A block like Mamba's: how long each unit remembers depends on the inputs."""

    WIDTH = 4  # steps that the convolution sees

    def __init__(self, inputs: int, units: int, outputs: int, size: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(inputs, 2 * units)
        self.convolution = nn.Conv1d(units, units, self.WIDTH, groups=units)
        self.select = nn.Linear(units, 2 * size)
        self.time_step = nn.Linear(units, units)
        self.log_rate = nn.Parameter(torch.log(torch.arange(1.0, size + 1)).repeat(units, 1))
        self.skip = nn.Parameter(torch.ones(units))
        self.readout = nn.Linear(units, outputs)
        nn.init.constant_(self.time_step.bias, -3.0)  # steps near 0.05: long memory to begin with

    def core(
        self, inputs: Tensor, state: dict[str, Tensor] | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Carry the last inputs of the convolution, and the `(batch, units, size)` state."""
        x, gate = self.enter(inputs).chunk(2, dim=-1)
        if state is None:
            past = x.new_zeros(self.WIDTH - 1, *x.shape[1:])
            state = {"past": past, "hidden": x.new_zeros(*x.shape[1:], self.log_rate.shape[1])}
        seen = torch.cat([state["past"], x])
        x = F.silu(self.convolution(seen.permute(1, 2, 0)).permute(2, 0, 1))
        write, read = self.select(x)[:, :, None].chunk(2, dim=-1)
        step = F.softplus(self.time_step(x))[..., None]
        keep = torch.exp(-step * torch.exp(self.log_rate))
        hidden, last = scan(keep, step * write * x[..., None], state["hidden"])
        features = ((hidden * read).sum(-1) + self.skip * x) * F.silu(gate)
        return features, {"past": seen[1 - self.WIDTH :], "hidden": last}

    def head(self, features: Tensor) -> Tensor:
        """Read the features out."""
        outputs: Tensor = self.readout(features)
        return outputs


def leaky(steps: int, rows: int) -> at.SequenceStream:
    """Return noise, and a sum of it whose memory fades."""
    inputs, zero = torch.randn(steps, rows, 1), torch.zeros(rows, 1)
    targets, _ = scan(torch.full((steps, 1, 1), FADES), 0.3 * inputs, zero)
    return at.SequenceStream(inputs, targets)


def main() -> None:
    """Train each layer with 32 steps of context, then diagnose it."""
    parser = argparse.ArgumentParser(description="Which context does a state-space layer need?")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()

    torch.manual_seed(0)
    stream, loss_fn = leaky(1000, 32), nn.MSELoss()
    for model in (LRU(1, 16, 1), Selective(1, 16, 1)):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        tbptt = at.AdaptiveTBPTT(model, loss_fn, at.FixedTruncation(32), losses=20)
        for _ in range(options.epochs):
            for window in tbptt.windows(stream):
                window.backward()
                optimizer.step()
                optimizer.zero_grad()
        loss = at.evaluate(model, loss_fn, stream)
        print(f"\n{type(model).__name__}: loss {loss:.4f}")
        print(at.diagnose(model, loss_fn, stream, losses=20, lags=100, seconds=3))
    print(f"\nThe target forgets by a factor of {FADES} per step, {FADES**20:.2f} in 20 steps.")


if __name__ == "__main__":
    main()
