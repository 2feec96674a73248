"""The change of predictions against history: known sums, and the coverage of the intervals."""

import numpy as np
import pytest

from adaptive_tbptt.estimate.history_curve import HistorySums, PartSums, history_curve


def sums_of(short, full, losses=None, weights=None):
    """Sum `(lengths, groups, samples, features)` and `(groups, samples, features)` by group."""
    groups = full.shape[0]
    part = PartSums(((short - full) ** 2).sum((-1, -2)), (full**2).sum((-1, -2)), full.sum(-2))
    losses = np.zeros((len(short) + 1, groups)) if losses is None else losses
    counts = np.full(groups, float(full.shape[1]))
    weights = counts if weights is None else weights
    return HistorySums(tuple(2 ** np.arange(len(short))), (part,), counts, losses, weights)


def test_by_hand():
    rng = np.random.default_rng(0)
    full = 5 + rng.normal(size=(6, 10, 3))
    short = full + rng.normal(size=(2, 6, 10, 3)) * np.array([0.5, 0.1]).reshape(2, 1, 1, 1)
    curve = history_curve(sums_of(short, full))
    flat = full.reshape(-1, 3)
    truth = ((short - full) ** 2).sum((1, 2, 3)) / ((flat - flat.mean(0)) ** 2).sum()
    assert curve.change == pytest.approx(truth, rel=1e-12)
    assert (curve.low < truth).all()
    assert (truth < curve.high).all()
    assert curve.end_points == 60


def test_intervals_cover_the_truth():
    """Heavy-tailed changes: 90 % intervals cover between 84 % and 95 % of the time."""
    rng, inside, runs = np.random.default_rng(1), 0, 600
    for _ in range(runs):
        scale = rng.exponential(size=(16, 20, 1))
        full = scale * rng.normal(size=(16, 20, 2))
        short = full + 0.3 * scale * rng.normal(size=(1, 16, 20, 2))
        curve = history_curve(sums_of(short, full))
        inside += curve.low[0] <= 0.09 <= curve.high[0]
    assert 0.84 < inside / runs < 0.95


def test_intervals_of_the_loss_are_of_its_difference_from_the_full_one():
    rng, inside, runs = np.random.default_rng(2), 0, 600
    full = np.ones((16, 4, 1)) + rng.normal(size=(16, 4, 1))
    for _ in range(runs):
        shared = 100 * rng.normal(size=16)  # what end points have in common cancels
        losses = np.stack([shared + 0.5 + rng.normal(size=16), shared])
        curve = history_curve(sums_of(full[None], full, losses))
        excess = np.array([curve.loss_low[0], curve.loss_high[0]]) - curve.full_loss
        inside += excess[0] <= 0.5 <= excess[1]
        assert excess[1] - excess[0] < 4
        assert curve.full_loss == pytest.approx(shared.mean())
    assert 0.86 < inside / runs < 0.94


def test_losses_are_weighted_and_groups_without_any_left_out():
    full = np.random.default_rng(3).normal(size=(4, 2, 1))
    losses = np.array([[1.0, 2.0, 3.0, np.nan], [0.0, 0.0, 6.0, np.nan]])
    curve = history_curve(sums_of(full[None], full, losses, np.array([1.0, 1.0, 2.0, 0.0])))
    assert curve.loss[0] == pytest.approx((1 + 2 + 2 * 3) / 4)
    assert curve.full_loss == pytest.approx(2 * 6 / 4)


def test_constant_predictions():
    full = np.full((5, 4, 2), 3.0)
    short = np.stack([full, full + 1e-7, full + 0.1])
    curve = history_curve(sums_of(short, full))
    assert curve.change.tolist() == [0.0, 0.0, np.inf]


@pytest.mark.parametrize(
    ("change", "steps"),
    [
        ([0.5, 0.1, 0.009, 0.001], 4),
        ([0.5, 0.009, 0.02, 0.001], 8),  # a longer history that changes more
        ([0.001, 0.001, 0.001, 0.001], 1),
        ([0.5, 0.1, 0.1, 0.02], None),
    ],
)
def test_the_shortest_history_is_one_that_all_longer_ones_confirm(change, steps):
    rng = np.random.default_rng(4)
    full = rng.normal(size=(16, 50, 1))
    unit = (full - full.mean()) ** 2
    short = full + np.sqrt(np.array(change) * unit.mean() / 1.0).reshape(-1, 1, 1, 1)
    curve = history_curve(sums_of(short, full))
    assert curve.change == pytest.approx(change, rel=1e-9)
    found, (low, high) = curve.shortest(0.01)
    assert found == steps
    if steps is not None:
        assert low <= found <= high


@pytest.mark.parametrize(
    ("losses", "steps"),
    [
        ([3.0, 2.1, 2.01, 2.0], 4),
        ([3.0, 1.9, 1.99, 2.0], 4),  # a lower loss is not that of the full history either
        ([3.0, 2.0, 2.1, 2.0], 8),
        ([3.0, 3.0, 3.0, 3.0], None),
        ([-3.0, -2.0, -2.0, -2.0], None),
    ],
)
def test_the_shortest_history_for_the_loss(losses, steps):
    full = np.random.default_rng(5).normal(size=(4, 3, 1))
    values = np.array([*losses, 2.0])[:, None] * np.ones(4)
    curve = history_curve(sums_of(np.stack([full] * 4), full, values))
    assert curve.shortest_for_loss(0.01) == steps
    flipped = history_curve(sums_of(np.stack([full] * 4), full, -values))
    assert flipped.shortest_for_loss(0.01) == steps
    zero = history_curve(sums_of(np.stack([full] * 4), full, values - 2.0))
    assert zero.shortest_for_loss(0.01) == (8 if losses[-1] == 2.0 else None)


def test_a_loss_that_is_equal_by_chance_is_not_enough():
    full = np.random.default_rng(6).normal(size=(4, 3, 1))
    losses = np.full((3, 4), 2.0)
    losses[0] += [0.5, -0.5, 0.5, -0.5]
    curve = history_curve(sums_of(np.stack([full] * 2), full, losses))
    assert curve.loss.tolist() == [2.0, 2.0]
    assert curve.shortest_for_loss(0.01) == 2
