"""The best guess: the smallest context whose estimated bias is at most delta."""

import numpy as np
import pytest

from adaptive_tbptt.estimate.guess import guess
from adaptive_tbptt.estimate.level_bias import level_bias
from adaptive_tbptt.estimate.level_sums import LevelSums
from adaptive_tbptt.estimate.truncation import Limits, Outcome

CONTEXTS = (0, 4, 8, 16)
HIDING = (100.0, 0.1, 0.1, 0.1)  # noise that hides the gradient, and lies in the losses' own steps


def choose(curve, delta=0.2, k_min=0, k_max=16, k_now=0):
    return guess(curve, Limits(delta, k_min, k_max, k_now))


def curve(added, noise=1e-3, groups=12):
    """Levels that add so much along one direction; the noise may differ by level."""
    rng = np.random.default_rng(0)
    mean = np.zeros((len(added), 8))
    mean[:, 0] = added
    noise = np.broadcast_to(noise, len(added))[:, None]
    vectors = mean + noise * rng.standard_normal((groups, *mean.shape))
    return level_bias(LevelSums(CONTEXTS, vectors.astype(np.float32), np.full(groups, 10.0), 10))


@pytest.mark.parametrize(
    ("added", "delta", "k"),
    [
        ([1.0, 0.0, 0.0, 0.0], 0.2, 0),
        ([0.85, 0.15, 0.0, 0.0], 0.2, 0),
        ([0.85, 0.15, 0.0, 0.0], 0.1, 4),
        ([0.5, 0.35, 0.15, 0.0], 0.2, 4),
        ([0.5, 0.35, 0.15, 0.0], 0.1, 8),
        ([0.0, 0.0, 0.0, 1.0], 0.2, 16),
        ([0.9, 0.4, -0.3, 0.0], 0.2, 8),  # 10 % is missed at 0, but 30 % at 4
    ],
)
def test_the_smallest_context_from_which_on_delta_is_met(added, delta, k):
    found = choose(curve(added), delta)
    assert (found.k, found.outcome, found.delta) == (k, Outcome.BEST_GUESS, delta)
    assert f"k={k}: with {k} steps of context the bias is about" in found.message
    assert found.message.endswith("against 16 steps")


def test_limits_are_kept():
    far = choose(curve([0.0, 0.1, 0.1, 0.8]), k_max=8)
    assert far.k == 8
    assert "the bias is about 0.8" in far.message
    assert choose(curve([1.0, 0.0, 0.0, 0.0]), k_min=4, k_now=16).k == 4


def test_an_estimate_that_meets_delta_is_enough_though_its_upper_limit_does_not():
    found = curve([0.85, 0.15, 0.0, 0.0], noise=0.15)
    assert found.estimate[0] < 0.2 < found.high[0]
    assert choose(found).k == 0


def test_k_does_not_fall_where_noise_hides_the_gradient():
    hidden = choose(curve([1.0, 0.0, 0.0, 0.0], noise=HIDING), k_now=8)
    assert (hidden.k, hidden.outcome) == (8, Outcome.HIDDEN)
    assert "noise hides the gradient" in hidden.message
    assert choose(curve([1.0, 0.0, 0.0, 0.0]), k_now=8).k == 0
    # A short stream is measured less far than the k that another one gave.
    assert choose(curve([1.0, 0.0, 0.0, 0.0], noise=HIDING), k_max=128, k_now=128).k == 128


@pytest.mark.parametrize(
    ("sizes", "now", "k"),
    [
        ([1.0, 0.1, 0.05, 0.05], 0, 0),  # single windows miss little
        ([1.0, 0.1, 0.05, 0.05], 8, 8),  # noise may hide what a shorter context would lose
        ([0.1, 1.0, 0.05, 0.05], 0, 4),
        ([0.1, 0.1, 0.1, 1.0], 0, 16),
    ],
)
def test_if_noise_hides_the_gradient_single_windows_decide_whether_k_grows(sizes, now, k):
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((12, 4, 50)) * np.array(sizes)[:, None]
    sums = LevelSums(CONTEXTS, vectors.astype(np.float32), np.full(12, 10.0), 20)
    found = choose(level_bias(sums), k_now=now)
    assert (found.k, found.outcome) == (k, Outcome.HIDDEN)
