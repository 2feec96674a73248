"""The pace of a context: what it gains at least, per step of work."""

import numpy as np
import pytest

from adaptive_tbptt.estimate.level_bias import level_bias
from adaptive_tbptt.estimate.level_sums import LevelSums
from adaptive_tbptt.estimate.pace import PaceLimits, choose_pace, paces
from adaptive_tbptt.estimate.truncation import Outcome

CONTEXTS = (0, 4, 8, 16)
HIDING = (100.0, 0.1, 0.1, 0.1)  # noise that hides the gradient, and lies in the losses' own steps


def choose(curve, *limits, **more):
    return choose_pace(curve, PaceLimits(*limits, **more))


def curve(added, losses=10, noise=1e-3, groups=12):
    """Levels that add so much along one direction; the noise may differ by level."""
    rng = np.random.default_rng(0)
    mean = np.zeros((len(added), 8))
    mean[:, 0] = added
    noise = np.broadcast_to(noise, len(added))[:, None]
    vectors = mean + noise * rng.standard_normal((groups, *mean.shape))
    return level_bias(
        LevelSums(CONTEXTS, vectors.astype(np.float32), np.full(groups, 10.0), losses)
    )


def test_pace_is_what_is_left_of_the_gradient_divided_by_the_steps():
    found = paces(curve([0.5, 0.3, 0.2, 0.0]))
    np.testing.assert_allclose(found, [0.5, 0.8 * 10 / 14, 10 / 18, 10 / 26], rtol=1e-2)


def test_a_step_gains_at_least_the_share_that_the_bias_leaves():
    rng = np.random.default_rng(1)
    for _ in range(200):
        whole, missed = rng.standard_normal((2, 5))
        missed *= rng.uniform() * np.linalg.norm(whole) / np.linalg.norm(missed)
        bias = np.linalg.norm(missed) / np.linalg.norm(whole)
        assert whole @ (whole - missed) >= (1 - bias) * (whole @ whole) - 1e-12


@pytest.mark.parametrize(
    ("added", "losses", "k"),
    [
        ([1.0, 0.0, 0.0, 0.0], 10, 0),
        ([0.9, 0.1, 0.0, 0.0], 10, 0),  # 10 % of bias is not worth 40 % more steps
        ([0.8, 0.2, 0.0, 0.0], 100, 4),  # 20 % of bias is worth 4 % more
        ([0.9, 0.1, 0.0, 0.0], 100, 0),  # better by 7 %, which is not clearly better
        ([0.5, 0.5, 0.0, 0.0], 10, 4),
        ([0.1, 0.1, 0.8, 0.0], 10, 8),
        ([0.0, 0.0, 0.0, 1.0], 10, 16),
    ],
)
def test_the_context_with_the_best_pace_is_chosen(added, losses, k):
    found = choose(curve(added, losses), 0, 16, k_now=0)
    assert (found.k, found.outcome) == (k, Outcome.BEST_PACE)
    assert f"k={k} has the best pace" in found.message
    assert found.delta is None


def test_limits_are_kept():
    assert choose(curve([0.0, 0.1, 0.1, 0.8]), 0, 8, k_now=0).k == 8
    assert choose(curve([1.0, 0.0, 0.0, 0.0]), 4, 16, k_now=16).k == 4


def test_k_stays_where_noise_hides_the_gradient_or_nothing_is_clearly_better():
    hidden = choose(curve([0.5, 0.5, 0.0, 0.0], noise=HIDING), 0, 16, k_now=8)
    assert (hidden.k, hidden.outcome) == (8, Outcome.KEPT)
    assert "noise hides the gradient" in hidden.message
    assert choose(curve([1.0, 0.0, 0.0, 0.0], noise=HIDING), 0, 8, k_now=None).k == 8
    assert choose(curve([1.0, 0.0, 0.0, 0.0]), 0, 8, k_now=None).k == 0
    # 10 / 14 at 4 against 0.7 at 0: 2 % are not worth a move, in either direction.
    level = curve([0.7, 0.3, 0.0, 0.0])
    assert choose(level, 0, 16, k_now=0).k == 0
    assert choose(level, 0, 16, k_now=4).k == 4


def test_without_a_gradient_and_with_a_stalled_loss_it_looks_further():
    hidden = curve([0.5, 0.5, 0.0, 0.0], losses=5, noise=HIDING)
    found = [choose(hidden, 0, 16, k_now=k, stalled=True).k for k in (0, 4, 8, 16)]
    assert found == [8, 8, 16, 16]
    shown = curve([1.0, 0.0, 0.0, 0.0])
    assert choose(shown, 0, 16, k_now=0, stalled=True).k == 0


def test_a_k_beyond_a_short_measurement_counts_as_the_longest_measured_one():
    assert choose(curve([1.0, 0.0, 0.0, 0.0]), 0, 128, k_now=128).k == 0
    assert choose(curve([0.0, 0.0, 0.0, 1.0]), 0, 128, k_now=128).k == 16
    # Noise hides the gradient: nothing speaks against the k in use, however far it reaches.
    hidden = curve([1.0, 0.0, 0.0, 0.0], noise=HIDING)
    assert choose(hidden, 0, 128, k_now=128).k == 128
    assert choose(hidden, 0, 128, k_now=128, stalled=True).k == 128
    # But nothing speaks for a longer one than was measured either.
    assert choose(hidden, 0, 128, k_now=None).k == 16
    assert choose(hidden, 0, 128, k_now=0, stalled=True).k == 16


@pytest.mark.parametrize(
    ("sizes", "now", "k"),
    [
        ([1.0, 0.1, 0.1, 0.1], 0, 0),  # single windows miss little
        ([1.0, 0.1, 0.1, 0.1], 8, 8),  # noise may hide what a shorter context would lose
        ([0.1, 1.0, 0.1, 0.1], 0, 4),
        ([0.1, 0.1, 0.1, 1.0], 0, 16),
    ],
)
def test_if_noise_hides_the_gradient_single_windows_decide_whether_k_grows(sizes, now, k):
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((12, 4, 50)) * np.array(sizes)[:, None]
    sums = LevelSums(CONTEXTS, vectors.astype(np.float32), np.full(12, 10.0), 20)
    found = choose(level_bias(sums), 0, 16, k_now=now)
    assert (found.k, found.outcome) == (k, Outcome.KEPT)
