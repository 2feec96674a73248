"""Whether the loss still falls: blocks of windows that double in length."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at
from adaptive_tbptt.loop.loss_trend import LossTrend


def feed(values, trend=None):
    """Return the trend, and what it said after every loss."""
    trend = LossTrend() if trend is None else trend
    said = []
    for value in values:
        trend.add(torch.tensor(float(value)))
        said.append(trend.stalled)
    return trend, said


def noisy(means, noise=0.1, seed=0):
    return np.asarray(means) + noise * np.random.default_rng(seed).standard_normal(len(means))


def test_nothing_is_known_before_two_blocks():
    said = feed(noisy(np.ones(130)))[1]
    assert said[:127] == [None] * 127
    assert said[127] is True


@pytest.mark.parametrize("power", [0.1, 0.3])
@pytest.mark.parametrize("shift", [-7.0, 0.0, 3.0])
def test_a_loss_that_falls_like_a_power_is_falling_however_late(power, shift):
    windows = np.arange(1, 5000)
    said = feed(noisy(shift + 2.0 * windows**-power, noise=0.05))[1]
    assert set(said[255:]) == {False}


def test_rare_large_values_do_not_hide_that_the_others_fall():
    rng = np.random.default_rng(0)
    falling = np.arange(1, 600) ** -0.5 * np.exp(rng.standard_normal(599))
    falling[rng.random(599) < 0.02] *= 30.0
    assert set(feed(falling)[1][255:]) == {False}
    below = falling.copy()
    below[0] = -1e-9  # one that has no logarithm: all are compared as they are
    assert feed(below)[0].stalled is True


def test_a_plateau_stalls_and_its_end_is_seen():
    fall, flat = np.linspace(2.0, 1.0, 100), np.ones(1900)
    said = feed(noisy(np.concatenate([fall, flat, np.linspace(1.0, 0.2, 3000)])))[1]
    assert said[255] is False
    assert {said[511], said[1023]} == {True}
    assert said[4095] is False


def test_a_loss_that_rises_or_is_no_number_has_stalled():
    assert feed(np.linspace(1.0, 2.0, 300))[0].stalled is True
    assert feed([1.0] * 100 + [float("nan")] * 200)[0].stalled is True


def test_equal_losses_have_stalled_by_chance_in_a_few_cases_not():
    """Two standard errors: one in forty falls clearly by chance."""
    falling = sum(feed(noisy(np.ones(128), seed=seed))[0].stalled is False for seed in range(400))
    assert 1 <= falling <= 25


def test_a_trend_that_was_saved_goes_on_as_if_it_had_not_been():
    values = noisy(np.linspace(2.0, 1.0, 700))
    whole, expected = feed(values)
    assert expected.count(None) == 127
    for cut in (3, 64, 200, 513):
        first, said = feed(values[:cut])
        saved = first.state_dict()
        second = LossTrend()
        second.load_state_dict(saved)
        _, rest = feed(values[cut:], second)
        assert said + rest == expected
        assert second.state_dict() == whole.state_dict()


def test_windows_without_a_loss_do_not_count():
    x, y = torch.randn(600, 2, 3), torch.full((600, 2), -100)
    y[::50] = 1
    tbptt = at.AdaptiveTBPTT(nn.GRU(3, 4), nn_loss, 0, losses=2)
    for window in tbptt.windows(at.SequenceStream(x, y)):
        window.backward()
    assert tbptt._tally.trend.state_dict()["windows"] == 12


def nn_loss(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def test_all_windows_of_a_block_are_counted_once():
    trend, _ = feed(itertools.repeat(1.0, 200))
    saved = trend.state_dict()
    assert (saved["windows"], saved["before"][0], saved["block"][0]) == (200, 64.0, 72.0)
