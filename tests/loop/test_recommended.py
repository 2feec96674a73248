"""The recommended loop: `AdaptiveTBPTT(model, loss_fn)`."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at
from adaptive_tbptt.truncate import BestPace


class Recall(nn.Module):
    """An LSTM that reads out what it saw."""

    def __init__(self, units=16):
        super().__init__()
        self.core = nn.LSTM(1, units)
        self.head = nn.Linear(units, 1)

    def forward(self, x, state=None):
        hidden, state = self.core(x, state)
        return self.head(hidden), state


def delayed(steps, rows, lag, generator):
    x = torch.randn(steps, rows, 1, generator=generator)
    return at.SequenceStream(x, torch.roll(x, lag, 0))


def train(tbptt, stream, epochs, optimizer):
    for _ in range(epochs):
        for window in tbptt.windows(stream):
            window.backward()
            optimizer.step()
            optimizer.zero_grad()


def test_nothing_but_model_and_loss_is_needed():
    tbptt = at.AdaptiveTBPTT(nn.GRU(2, 2), F.mse_loss)
    assert tbptt.controller == at.Unbiased(128, 0.5, when_stalled=True, base=BestPace(128))
    assert (tbptt.losses, tbptt.losses_per_k, tbptt.k) == (20, 1.0, 0)
    assert at.AdaptiveTBPTT(nn.GRU(2, 2), F.mse_loss, losses=35).losses == 35


@pytest.mark.parametrize(
    ("options", "k", "losses"),
    [
        ({}, 7, 7),
        ({"losses": 10}, 7, 10),
        ({"losses": 10}, 40, 10),
        ({"losses_per_k": 0.5}, 40, 20),
        ({"losses_per_k": 0.5}, 1, 1),
        ({"losses": 10, "losses_per_k": 1.0}, 7, 10),
        ({"losses": 10, "losses_per_k": 1.0}, 40, 40),
        ({"losses": 10, "losses_per_k": 0.5}, 40, 20),
    ],
)
def test_a_window_carries_the_larger_number_of_losses(options, k, losses):
    tbptt = at.AdaptiveTBPTT(nn.GRU(2, 2), F.mse_loss, at.FixedTruncation(40), **options)
    assert tbptt.losses_per_window(k) == losses


def test_context_and_losses_grow_once_the_gradient_comes_from_far_back():
    """The inputs of 30 steps ago are asked for; windows start with 10 losses and no context."""
    torch.manual_seed(0)
    stream = delayed(2000, 32, 30, torch.Generator().manual_seed(0))
    model = Recall()
    with torch.no_grad():  # a long memory from the start, so that the test is short
        model.core.bias_hh_l0[16:32] = 3.0
    controller = at.Unbiased(64, base=BestPace(k_max=64))
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, controller, losses=10, losses_per_k=1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(tbptt, stream, 16, optimizer)
    assert tbptt.k >= 32
    assert tbptt.losses_per_window(tbptt.k) == tbptt.k


def test_estimates_read_at_most_their_share_and_become_rarer():
    torch.manual_seed(0)
    stream = at.SequenceStream(torch.randn(40_000, 1, 1), torch.randn(40_000, 1, 2))
    tbptt = at.AdaptiveTBPTT(nn.RNN(1, 2), F.mse_loss, BestPace(k_max=4), losses=10, burn_in=0)
    cost = 8 * 14
    for window in tbptt.windows(stream):
        window.backward()
        assert tbptt.probed_steps <= 0.05 * tbptt.trained_steps + 2 * cost
    steps = [e.step for e in tbptt.history]
    gaps = [b - a for a, b in pairwise(steps)]
    assert (steps[0], gaps[0], gaps[1]) == (80, 560, 2240)
    assert gaps[-1] == 2240  # until 5 % of what was trained is more


def test_a_stream_of_unknown_length_needs_no_schedule():
    chunks = [(torch.randn(50, 2, 1), torch.randn(50, 2, 2)) for _ in range(60)]
    stream = at.ChunkStream(chunks)
    tbptt = at.AdaptiveTBPTT(nn.RNN(1, 2), F.mse_loss, BestPace(k_max=4), losses=10, burn_in=0)
    for window in tbptt.windows(stream):
        window.backward()
    assert [e.step for e in tbptt.history] == [80, 640, 2880]


@pytest.mark.parametrize("k", [0, 3, 10, 16])
def test_no_step_runs_only_to_find_a_state(k):
    """Where the next window starts, among the losses too, its state is held."""
    steps = []

    class Counted(nn.GRU):
        def forward(self, x, state=None):
            steps.append(len(x))
            return super().forward(x, state)

    stream = at.SequenceStream(torch.randn(400, 2, 3), torch.randn(400, 2, 4))
    tbptt = at.AdaptiveTBPTT(Counted(3, 4), F.mse_loss, k, losses=10)
    tbptt.prepare(stream)
    for window in tbptt.windows(stream):
        steps.clear()
        window.backward()
        assert sum(steps) == window.stop - window.start


@pytest.mark.parametrize(("steps", "lags"), [(15, None), (41, None), (60, 16), (168, 128)])
def test_a_short_stream_is_measured_as_far_as_it_goes(steps, lags):
    """With 20 steps of burn-in and 20 losses."""
    torch.manual_seed(0)
    stream = at.SequenceStream(torch.randn(steps, 4, 3), torch.randn(steps, 4, 5))
    tbptt = at.AdaptiveTBPTT(nn.GRU(3, 5), F.mse_loss)
    for _ in range(12):
        for window in tbptt.windows(stream):
            window.backward()
    assert tbptt.trained_steps == 12 * steps
    assert (tbptt.evidence and tbptt.evidence.lags) == lags


def test_lags_that_were_asked_for_are_not_given_up():
    stream = at.SequenceStream(torch.randn(60, 4, 3), torch.randn(60, 4, 5))
    tbptt = at.AdaptiveTBPTT(nn.GRU(3, 5), F.mse_loss, BestPace(), losses=20)
    with pytest.raises(ValueError, match="does not fit into a stream"):
        tbptt.estimate(stream)
