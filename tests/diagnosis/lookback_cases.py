"""Models of known memory, and histories by brute force, for the tests of `lookback`."""

import math

import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at

ALL = 1e9  # seconds
DECAY = math.exp(-1 / 60)  # of the reservoir: time constant 60


class Leaky(nn.Module):
    """A reservoir: h_t = a h_{t-1} + x_t, the output is h_t."""

    def __init__(self, decay=DECAY):
        super().__init__()
        self.decay = decay

    def forward(self, x, state):
        state = torch.zeros_like(x[0]) if state is None else state
        powers = self.decay ** torch.arange(len(x) + 1, dtype=x.dtype).view(-1, 1, 1)
        h = powers[1:] * state + powers[:-1] * (x / powers[:-1]).cumsum(0)
        return h, h[-1]


class Recall(nn.Module):
    """Repeats what it read `delay` steps ago."""

    def __init__(self, delay=25):
        super().__init__()
        self.delay = delay

    def forward(self, x, state):
        state = x.new_zeros(self.delay, *x.shape[1:]) if state is None else state
        seen = torch.cat([state, x])
        return seen[: len(x)], seen[len(x) :]


def noise(steps=1500, rows=8, seed=0, features=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(steps, rows, features, generator=generator, dtype=torch.float64)


def lookback(model, data, loss_fn=F.mse_loss, seconds=0.0, **options):
    """Measure as few end points as allowed; `seconds=ALL` takes all. No clock decides."""
    data = (data, data) if isinstance(data, torch.Tensor) else data
    return at.lookback(model, loss_fn, data, seconds=seconds, **options)


def brute_force(run, x, last_target, loss_fn, lengths):
    """Change and loss of windows `(time, batch, ...)` by a plain loop over histories."""
    full = run(x)
    rows = {}
    for h in lengths:
        y = run(x[-h:])
        change = (y - full).square().sum() / (full - full.mean(0)).square().sum()
        rows[h] = float(change), float(loss_fn(y, last_target))
    return rows, float(loss_fn(full, last_target))


class Regressor(nn.Module):
    """A GRU and a readout; of every step, or of the last one alone."""

    def __init__(self, batch_first=False, last=False):
        super().__init__()
        self.gru, self.out = nn.GRU(3, 5, batch_first=batch_first), nn.Linear(5, 2)
        self.batch_first, self.last = batch_first, last
        self.double()

    def forward(self, x, state):
        y, state = self.gru(x, state)
        if self.last:
            y = y[:, -1] if self.batch_first else y[-1]
        return self.out(y), state
