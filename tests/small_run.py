"""A small run of the trainer, and ways to break it off."""

import json
import signal

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at

STEPS, ROWS = 120, 4


class Model(nn.Module):
    """Dropout and a buffer: things that only an exact resume gets right."""

    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(3, 6, 2, dropout=0.3), nn.Linear(6, 2)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(()))

    def core(self, x, state):
        self.calls += 1
        return self.lstm(x, state)

    def head(self, h):
        return self.out(self.drop(h))

    def forward(self, x, state):
        h, state = self.core(x, state)
        return self.head(h), state


def streams():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, ROWS, 3, generator=g)
    y = torch.roll(x, 3, 0)[..., :2]
    return at.SequenceStream(x, y), at.SequenceStream(x[:40], y[:40])


def build(run_dir=None, controller=None, *, device="cpu", windows=None, **options):
    """A trainer of the small run; `windows` are further arguments of `AdaptiveTBPTT`."""
    torch.manual_seed(3)
    model = Model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    controller = controller or at.BiasTolerance(
        delta=0.3, k_max=12, lags=20, k_init=4, gauge=at.truncate.PaperGauge()
    )
    windows = {"estimates_per_epoch": 3, "burn_in": 3, **(windows or {})}
    return at.Trainer(
        at.AdaptiveTBPTT(model, F.mse_loss, controller, **windows), optimizer, run_dir=run_dir,
        scheduler=scheduler, clip=at.loop.Clip(1.0, per_loss=True), show=False, **options,
    )  # fmt: skip


class StopAt:
    """A logger's view of a run, and an interruption after a given number of updates."""

    def __init__(self, trainer, updates):
        self.trainer, self.updates = trainer, updates
        update = trainer._update

        def counted(window):
            update(window)
            if trainer.updates == updates:
                signal.raise_signal(signal.SIGINT)

        trainer._update = counted


def final(trainer):
    return {k: v.clone() for k, v in trainer.model.state_dict().items()}


def without_times(lines):
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def interrupted_run(folder, stops, make=build, epochs=3):
    for stop in stops:
        trainer = make(folder)
        StopAt(trainer, stop)
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(*streams(), epochs=epochs, resume=True)
    trainer = make(folder)
    result = trainer.fit(*streams(), epochs=epochs, resume=True)
    return trainer, result
