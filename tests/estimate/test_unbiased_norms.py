"""Squared norms of means, freed of noise: against vectors whose means are known."""

import numpy as np
import pytest

from adaptive_tbptt.estimate.unbiased_norms import (
    Jackknife,
    chance,
    groups_needed,
    ratio_limits,
    squared_means,
    student_quantile,
)


def gram(vectors):
    """Inner products between groups, of `(..., groups, size)`."""
    return vectors @ np.swapaxes(vectors, -1, -2)


def test_squared_mean_of_two_groups_by_hand():
    found = squared_means(gram(np.array([[1.0, 2.0], [3.0, -1.0]])), np.array([1, 1]))
    assert found.value == pytest.approx(1 * 3 - 2 * 1)  # the one product of the two


def test_squared_means_are_unbiased_whatever_the_sizes_of_the_groups():
    mean, sizes, rng = (
        np.array([0.3, -0.1, 0.0, 0.2]),
        np.array([1, 5, 2, 7]),
        np.random.default_rng(0),
    )
    values = []
    for _ in range(4000):
        sums = np.stack([(mean + rng.standard_normal((n, 4))).sum(axis=0) for n in sizes])
        values.append(squared_means(gram(sums), sizes).value)
    error = np.std(values) / np.sqrt(len(values))
    assert abs(np.mean(values) - mean @ mean) < 4 * error
    assert np.mean(values) < 0.5 * (mean @ mean + 4 / sizes.sum())  # what a plain norm would give


def test_leaving_a_group_out_is_what_the_others_give():
    v, sizes = np.random.default_rng(0).standard_normal((3, 5, 32)), np.array([2, 3, 1, 4, 2])
    found = squared_means(gram(v), sizes)
    for g in range(5):
        rest = [i for i in range(5) if i != g]
        alone = squared_means(gram(v[:, rest]), sizes[rest])
        np.testing.assert_allclose(found.without_group[:, g], alone.value, rtol=1e-9)


def test_one_group_alone_tells_nothing():
    found = squared_means(gram(np.array([[1.0, 2.0]])), np.array([3]))
    assert found.value == 0.0
    assert found.without_group.tolist() == [0.0]
    vectors = np.random.default_rng(0).standard_normal((4, 2, 9))
    pair = squared_means(gram(vectors), np.array([3, 0.1]))
    assert (pair.without_group == 0.0).all()  # not a rounding error over nothing
    assert ratio_limits(pair, squared_means(gram(vectors[0]), np.array([3, 0.1])), 1.0) is None


def means_of(x):
    """Plain means with one number left out in turn: the jackknife of a mean is its error."""
    return Jackknife(x.mean(axis=-1), (x.sum(axis=-1, keepdims=True) - x) / (x.shape[-1] - 1))


def test_limits_of_a_ratio_are_where_the_difference_is_as_large_as_its_error():
    rng = np.random.default_rng(0)
    above, below = 1 + rng.standard_normal((3, 40)), 2 + rng.standard_normal(40)
    for limit in ratio_limits(means_of(above), means_of(below), 1.7):
        for r, row in zip(limit, above, strict=True):
            rest = row - r * below
            assert abs(rest.mean()) == pytest.approx(1.7 * rest.std(ddof=1) / np.sqrt(40), rel=1e-9)


def test_a_ratio_to_what_is_known_exactly_has_the_error_of_its_numerator():
    above = np.random.default_rng(0).standard_normal(40)
    low, high = ratio_limits(means_of(above), means_of(np.full(40, 2.0)), 1.7)
    error = above.std(ddof=1) / np.sqrt(40)
    assert low == pytest.approx((above.mean() - 1.7 * error) / 2, rel=1e-9)
    assert high == pytest.approx((above.mean() + 1.7 * error) / 2, rel=1e-9)


def test_a_ratio_to_what_may_be_zero_has_no_limits():
    x = np.random.default_rng(0).standard_normal(40)
    noise = x - x.mean() + 0.2  # 1.3 standard errors from zero
    assert ratio_limits(means_of(x), means_of(noise), 1.7) is None
    assert ratio_limits(means_of(x), means_of(noise), 1.0) is not None
    assert ratio_limits(means_of(x), means_of(-noise), 1.0) is None  # a square is not negative


@pytest.mark.parametrize(("level", "nu", "expected"), [(0.95, 7, 1.8946), (0.975, 15, 2.1314)])
def test_quantile_is_students(level, nu, expected):
    assert student_quantile(level, nu + 1) == pytest.approx(expected, rel=2e-3)


def test_chance_is_uniform_without_a_mean_and_small_with_one():
    rng = np.random.default_rng(1)
    none = [chance(gram(rng.standard_cauchy((10, 3))), flips=200, seed=i) for i in range(300)]
    assert 0.02 < np.mean(np.array(none) <= 0.1) < 0.2
    assert chance(gram(1.0 + 0.1 * rng.standard_normal((10, 3)))) < 0.01
    assert chance(gram(np.ones((40, 1))), flips=100) == 0.01  # the signs that were drawn count too


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.99])
def test_as_many_groups_as_are_needed_can_tell_and_one_less_cannot(level):
    needed = groups_needed(level)
    clear = np.ones((needed, 1))  # nothing but mean: no other choice of signs looks as much like it
    assert chance(gram(clear), flips=100_000) == pytest.approx(2.0 ** (1 - needed), rel=0.2)
    assert 2.0 ** (1 - needed) <= (1 - level) / 2
    assert needed == 2 or 2.0 ** (2 - needed) > (1 - level) / 2
