"""What is said while training when the assumption does not hold."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import adaptive_tbptt as at
from adaptive_tbptt.truncate.remedies import what_to_do

PAPER = at.truncate.PaperGauge()


class Leaks(nn.Module):
    """h_t = decay * h_{t-1} + x_t, each unit with a decay of its own."""

    def __init__(self, decays) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.tensor(decays))

    def forward(self, inputs, state=None):
        h = torch.zeros_like(inputs[0]) if state is None else state
        out = []
        for x in inputs:
            h = self.decay * h + x
            out.append(h)
        return torch.stack(out), h


def stream(units=5):
    return at.SequenceStream(torch.randn(200, 4, units), torch.randn(200, 4, units))


def test_dimensions_that_do_not_decay_are_counted_and_their_part_named():
    model = Leaks([0.999, 0.5, 1.0, 0.6, 0.7])
    x, y = torch.randn(40, 4, 5), torch.randn(40, 4, 5)
    profile = at.probe(model, nn.functional.mse_loss, x, y)
    assert "is in h, nine tenths of that in 2 of its 5 dimensions" in profile.slow_part(0.9999)
    assert profile.slow_part(0.9) is None


def test_training_says_that_nothing_decays_and_what_to_do():
    rule = at.BiasTolerance(0.1, k_max=10, lags=30, gauge=PAPER)
    tbptt = at.AdaptiveTBPTT(Leaks([1.01] * 5), nn.functional.mse_loss, rule)
    with pytest.warns(at.TruncationWarning, match="does not decay.*of its 5 dim.*MeasuredGauge"):
        tbptt.estimate(stream())


def test_training_says_that_the_lags_are_too_few():
    rule = at.BiasTolerance(0.1, k_max=100, lags=12, gauge=PAPER)
    tbptt = at.AdaptiveTBPTT(Leaks([0.9] * 5), nn.functional.mse_loss, rule)
    with pytest.warns(at.TruncationWarning, match="measure more lags"):
        tbptt.estimate(stream())


def test_each_outcome_is_warned_of_once_however_often_it_comes_back():
    rule = at.BiasTolerance(0.1, k_max=10, lags=30, gauge=PAPER)
    model, data = Leaks([1.01] * 5), stream()
    tbptt = at.AdaptiveTBPTT(model, nn.functional.mse_loss, rule)

    def estimates(tbptt):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for decay in (1.01, 0.3, 1.01, 0.3, 1.01):
                model.decay.data.fill_(decay)
                tbptt.estimate(data)
        return [w for w in caught if "does not decay" in str(w.message)]

    assert len(estimates(tbptt)) == 1
    resumed = at.AdaptiveTBPTT(model, nn.functional.mse_loss, rule)
    resumed.load_state_dict(tbptt.state_dict())
    assert estimates(resumed) == []


def test_nothing_is_said_where_all_is_well():
    rule = at.BiasTolerance(0.1, k_max=100, lags=60, gauge=PAPER)
    tbptt = at.AdaptiveTBPTT(Leaks([0.7] * 5), nn.functional.mse_loss, rule)
    tbptt.estimate(stream())
    assert tbptt.truncation.decision.outcome is at.estimate.Outcome.MET
    assert what_to_do(tbptt.evidence, tbptt.truncation.decision) is None


def test_noise_that_hides_the_gradient_is_said():
    torch.manual_seed(1)
    gauge = at.truncate.MeasuredGauge(budget=at.truncate.ProbeBudget(1, 2, 0))
    rule = at.BiasTolerance(0.1, k_max=20, lags=20, k_init=7, gauge=gauge)
    tbptt = at.AdaptiveTBPTT(Leaks([0.3] * 5), nn.functional.mse_loss, rule)
    with pytest.warns(at.TruncationWarning, match="noise hides.*larger ProbeBudget"):
        # Two windows cannot tell a gradient from noise.
        tbptt.estimate(at.SequenceStream(torch.randn(200, 1, 5), torch.randn(200, 1, 5)))
    assert tbptt.k == 7
