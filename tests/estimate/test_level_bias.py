"""The bias by level: against levels whose means are known, and what is chosen from it."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import adaptive_tbptt as at
from adaptive_tbptt.estimate import LevelCurve, LevelSums, Limits, Outcome, levels_up_to
from adaptive_tbptt.estimate.level_bias import level_bias

CONTEXTS = (0, 1, 2, 4, 8, 16, 32)


def made_up(mean, noise, groups, size=4, rng=None, contexts=CONTEXTS, losses=1):
    """Levels `(levels, m)` with known means: a sample is mean[j] + noise[j] * normal."""
    rng = np.random.default_rng(0) if rng is None else rng
    mean, noise = np.asarray(mean, dtype=float), np.asarray(noise, dtype=float)
    shape = (groups, size, *mean.shape)
    samples = mean + noise[:, None] * rng.standard_normal(shape)
    return LevelSums(
        contexts, samples.sum(axis=1).astype(np.float32), np.full(groups, float(size)), losses
    )


def geometric(beta, contexts=CONTEXTS):
    """What every level adds where lag k adds beta^k; level 0 is lag 0."""
    edges = [-1, *contexts]
    return np.array([sum(beta**k for k in range(a + 1, b + 1)) for a, b in pairwise(edges)])


def true_bias(mean):
    """b_j for levels with these means."""
    missing = np.cumsum(mean[::-1], axis=0)[::-1]
    cut = np.concatenate([missing[1:], np.zeros_like(missing[:1])])
    return np.linalg.norm(cut, axis=1) / np.linalg.norm(missing[0])


def curve(low, high=None, contexts=CONTEXTS, tail=0.0, **options):
    """A curve with given limits; the estimate lies between them."""
    low, high = np.asarray(low, dtype=float), np.asarray(low if high is None else high, dtype=float)
    found = {
        "contexts": contexts,
        "estimate": (low + np.where(np.isfinite(high), high, low)) / 2,
        "low": low,
        "high": high,
        "single": low,
        "tail": tail,
        "beta": 0.5,
        "gradient_norm": 1.0,
        "chance": 0.0,
        "losses": 1,
        "samples": 64,
        "level": 0.9,
    }
    return LevelCurve(**{**found, **options})


def chosen(found, delta=0.1, k_min=0, k_max=32, k_now=None):
    choice = at.choose_truncation(found, delta=delta, k_min=k_min, k_max=k_max, k_now=k_now)
    return choice.k, choice.outcome


class TestMeasurement:
    def test_a_known_bias_is_measured_without_bias_and_covered(self):
        rng, m = np.random.default_rng(2), 64
        mean = geometric(0.8)[:, None] * rng.standard_normal((len(CONTEXTS), m)) / math.sqrt(m)
        noise = 0.6 * geometric(0.8) / math.sqrt(m)
        true = true_bias(mean)[:-1]
        squares, covered = [], []
        for _ in range(300):
            sums = made_up(mean, noise, groups=16, size=2, rng=rng)
            found = level_bias(sums, level=0.9)
            assert not found.hidden
            squares.append(found.estimate[:-1] ** 2)
            covered.append((found.low[:-1] <= true) & (true <= found.high[:-1]))
        error = np.std(squares, axis=0) / math.sqrt(300)
        # A ratio of unbiased estimates is biased to second order only.
        assert (abs(np.mean(squares, axis=0) - true**2) < 4 * error + 0.01 * true**2).all()
        assert (np.mean(covered, axis=0) >= 0.85).all()

    def test_noise_is_not_taken_for_bias(self):
        """Nothing but level 0 has a mean: the plain norm of the rest would be half of it."""
        rng, mean = np.random.default_rng(3), np.zeros((7, 256))
        mean[0] = 1 / 16
        noise = np.full(7, 0.05)
        squares, naive = [], []
        for _ in range(200):
            sums = made_up(mean, noise, groups=8, size=1, rng=rng)
            vectors = sums.vectors.astype(float)
            rest = vectors[:, 1:].sum(axis=1)
            pairs = rest.sum(axis=0) @ rest.sum(axis=0) - (rest * rest).sum()
            squares.append(pairs / 56)
            naive.append(np.linalg.norm(rest.mean(axis=0)))
            assert level_bias(sums).low[0] < 0.35
        assert np.mean(naive) > 0.5
        assert abs(np.mean(squares)) < 4 * np.std(squares) / math.sqrt(200)

    def test_without_a_mean_the_gradient_is_hidden_nearly_always(self):
        rng, told = np.random.default_rng(1), 0
        for _ in range(300):
            sums = made_up(np.zeros((7, 64)), geometric(0.7), groups=12, rng=rng)
            found = level_bias(sums, level=0.9)
            told += not found.hidden
            if found.hidden:
                assert np.isnan(found.estimate).all()
                assert (found.low == 0).all()
                assert np.isinf(found.high).all()
        assert told <= 27  # a twentieth of 300, and luck

    def test_too_few_groups_tell_nothing_however_alike_they_are(self):
        for groups, hidden in ((1, True), (2, True), (5, True), (6, False)):
            sums = made_up(geometric(0.5)[:, None], np.zeros(7), groups)
            assert level_bias(sums, level=0.9).hidden is hidden

    @pytest.mark.parametrize("strength", [0.5, 0.8, 3.0])
    def test_limits_are_wrong_no_more_often_than_they_say(self, strength):
        # A mean of this length in noise; the cut is half of it. At 0.5 a sixth is told from noise.
        rng = np.random.default_rng(0)
        mean = strength * np.eye(30)[0]
        found = []
        for _ in range(200):
            noise = rng.normal(size=(16, 30))
            whole, cut = mean + noise, 0.5 * mean + 0.1 * noise[:, ::-1]
            vectors = np.stack([whole - cut, cut], axis=1).astype("f4")
            found.append(level_bias(LevelSums((0, 9), vectors, np.ones(16), 1), 0.9))
        assert sum(one.high[0] < 0.5 for one in found) <= 15  # 10 at most, and luck
        assert sum(one.low[0] > 0.5 for one in found) <= 15
        assert strength < 3.0 or all(math.isfinite(one.high[0]) for one in found)

    def test_groups_of_many_segments_say_the_same_as_single_ones(self):
        rng, mean = np.random.default_rng(5), geometric(0.6)[:, None] * np.ones(64)
        fine = made_up(mean, 2.0 * geometric(0.6), groups=192, size=4, rng=rng)
        merged = LevelSums(
            CONTEXTS,
            fine.vectors.reshape(24, 8, 7, 64).sum(axis=1),
            fine.counts.reshape(24, 8).sum(axis=1),
            1,
        )
        assert merged.samples == fine.samples
        one, other = level_bias(merged), level_bias(fine)
        true = true_bias(mean)
        assert (one.low[:4] <= true[:4]).all()
        assert (true[:4] <= one.high[:4]).all()
        np.testing.assert_allclose(one.estimate[:4], other.estimate[:4], rtol=0.1)

    def test_groups_count_by_their_losses(self):
        """Twice the losses with twice the sum say the same as the same group given twice."""
        rng, mean = np.random.default_rng(5), geometric(0.6)[:, None] * np.ones(16)
        sums = made_up(mean, 0.5 * geometric(0.6), groups=12, rng=rng)
        factors = np.array([1.0, 2.0] * 6)
        heavy = replace(
            sums,
            vectors=(sums.vectors * factors[:, None, None]).astype("f4"),
            counts=sums.counts * factors,
        )
        whole = heavy.vectors.astype(float).sum(axis=1)
        sizes = heavy.counts
        pairs = sum(
            whole[i] @ whole[j] for i in range(12) for j in range(12) if i != j
        ) / sum(sizes[i] * sizes[j] for i in range(12) for j in range(12) if i != j)  # fmt: skip
        assert level_bias(heavy).gradient_norm == pytest.approx(math.sqrt(pairs), rel=1e-6)

    def test_heavy_tails_in_few_numbers_give_no_nan(self):
        rng = np.random.default_rng(0)
        for _ in range(300):
            z = rng.standard_t(2, (8, 3, 16)) * 0.2
            z[..., 0] += 1.0
            found = level_bias(LevelSums((0, 1, 2), z.astype(np.float32), np.full(8, 4.0), 1))
            assert np.isfinite(found.low).all()
            assert not np.isnan(found.high).any()
            assert (found.low <= found.high).all()
            assert found.hidden or (found.estimate <= found.high).all()

    def test_the_longest_context_is_the_reference(self):
        found = level_bias(made_up(geometric(0.8)[:, None], 0.1 * geometric(0.8), groups=12))
        assert (found.estimate[-1], found.low[-1], found.high[-1]) == (0.0, 0.0, 0.0)
        assert found.lags == 32
        assert found.samples == 48

    @given(st.floats(1e-6, 1e6), st.integers(0, 100))
    @settings(max_examples=20, deadline=None)
    def test_the_scale_of_the_loss_does_not_matter(self, scale, seed):
        rng = np.random.default_rng(seed)
        sums = made_up(geometric(0.8)[:, None] * np.ones(8), geometric(0.8), groups=12, rng=rng)
        one, other = (
            level_bias(replace(sums, vectors=(v * sums.vectors).astype(np.float32)))
            for v in (1.0, scale)
        )
        for a, b in ((one.low, other.low), (one.high, other.high)):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
        assert other.gradient_norm == pytest.approx(scale * one.gradient_norm, rel=1e-3)

    def test_more_samples_narrow_the_intervals(self):
        mean, noise = geometric(0.8)[:, None] * np.ones(16), geometric(0.8)
        few, many = (level_bias(made_up(mean, noise, 16, size)) for size in (4, 400))
        assert ((many.high - many.low)[:-1] < (few.high - few.low)[:-1] / 4).all()

    @pytest.mark.parametrize("level", [0.0, 1.0, 1.5])
    def test_the_level_is_checked(self, level):
        with pytest.raises(ValueError, match=r"level must be in \(0, 1\)"):
            level_bias(made_up(np.ones((7, 1)), np.ones(7), 4), level)


class TestTail:
    @pytest.mark.parametrize("beta", [0.5, 0.9, 0.97])
    @pytest.mark.parametrize("contexts", [CONTEXTS, (0, 1, 2, 4, 8, 16, 20), (0, 10, 20, 30)])
    def test_of_a_geometric_decay_it_is_the_closed_form(self, beta, contexts):
        """Lags up to R add (1 - beta^(R+1)) / (1 - beta), those beyond beta^(R+1) / (1 - beta)."""
        mean = geometric(beta, contexts)
        sums = made_up(np.stack([mean, -mean], axis=1), 1e-6 * mean, groups=12, contexts=contexts)
        found = level_bias(sums)
        last = contexts[-1]
        expected = beta ** (last + 1) / (1 - beta ** (last + 1))
        assert found.tail == pytest.approx(expected, rel=1e-3)
        assert found.beta == pytest.approx(beta, rel=1e-4)
        assert found.tau == contexts[-3]

    def test_levels_that_do_not_decay_leave_it_open(self):
        for beta in (1.0, 1.1):
            mean = geometric(beta)[:, None]
            found = level_bias(made_up(mean, 1e-3 * geometric(beta), groups=12))
            assert math.isinf(found.tail)
            assert found.beta == 1.0
            # k = 8 keeps lags 0..8 of 0..32; that it may be enough does not make it so.
            assert chosen(found, delta=0.9, k_now=8) == (
                8 if beta == 1.0 else 16,
                Outcome.UNRESOLVED,
            )
            assert chosen(found) == (32, Outcome.UNRESOLVED)
            assert "has not decayed within 32 steps" in (
                at.choose_truncation(found, delta=0.9, k_max=32).message
            )

    def test_a_last_level_that_noise_hides_has_none(self):
        mean = np.where(np.arange(7) < 6, geometric(0.5), 0.0)[:, None] * np.ones(32)
        found = level_bias(made_up(mean, np.full(7, 1e-3), groups=12))
        assert found.tail == 0.0
        assert math.isnan(found.beta)

    def test_two_levels_say_nothing_of_it(self):
        found = level_bias(made_up(np.ones((2, 1)), np.full(2, 1e-3), 12, contexts=(0, 8)))
        assert math.isinf(found.tail)

    def test_it_is_added_to_what_must_be_met(self):
        low = [0.9, 0.6, 0.3, 0.05, 0.02, 0.0, 0.0]
        assert chosen(curve(low)) == (4, Outcome.MET)
        assert chosen(curve(low, tail=0.06)) == (8, Outcome.MET)
        assert chosen(curve(low, tail=0.2), k_now=8) == (8, Outcome.UNRESOLVED)


class TestChoice:
    def test_the_smallest_level_that_surely_meets_delta(self):
        low, high = [0.8, 0.5, 0.3, 0.04, 0, 0, 0], [0.9, 0.7, 0.4, 0.09, 0.05, 0.01, 0]
        assert chosen(curve(low, high)) == (4, Outcome.MET)
        assert chosen(curve(low, high), delta=0.95) == (0, Outcome.MET_AT_MINIMUM)
        assert chosen(curve(low, high), delta=0.95, k_min=2) == (2, Outcome.MET_AT_MINIMUM)
        message = at.choose_truncation(curve(low, high), delta=0.1, k_max=32).message
        assert message == "k=4 meets delta=0.1: bias 0.065 [0.04, 0.09]"
        message = at.choose_truncation(curve(low, high), delta=0.95, k_min=0, k_max=32).message
        assert message == "delta=0.95 is met already at k_min=0: bias 0.85 [0.8, 0.9]"

    def test_one_level_further_than_may_do_still_counts_as_resolved(self):
        low, high = [0.8, 0.5, 0.09, 0.04, 0, 0, 0], [0.9, 0.7, 0.4, 0.09, 0.05, 0.01, 0]
        assert chosen(curve(low, high)) == (4, Outcome.MET)

    def test_beyond_the_maximum(self):
        low, high = [0.8, 0.5, 0.3, 0.2, 0.15, 0.05, 0], [0.9, 0.7, 0.4, 0.3, 0.2, 0.08, 0]
        assert chosen(curve(low, high), k_max=8) == (8, Outcome.BEYOND_MAXIMUM)
        message = at.choose_truncation(curve(low, high), delta=0.1, k_max=8).message
        assert message == "no k up to 8 meets delta=0.1: bias 0.175 [0.15, 0.2] at 8; using 8"
        assert chosen(curve(low, high), k_max=16) == (16, Outcome.MET)

    def test_unresolved_keeps_k_and_moves_only_as_far_as_the_evidence_demands(self):
        low, high = [0.8, 0.5, 0.05, 0, 0, 0, 0], [0.9, 0.8, 0.7, 0.4, 0.2, 0.08, 0]
        found = curve(low, high)
        kept = {k: chosen(found, k_now=k) for k in (0, 1, 2, 4, 8, 16, 32, None)}
        assert kept == {
            0: (2, Outcome.UNRESOLVED),  # 0 and 1 surely miss delta
            1: (2, Outcome.UNRESOLVED),
            2: (2, Outcome.UNRESOLVED),
            4: (4, Outcome.UNRESOLVED),
            8: (8, Outcome.UNRESOLVED),
            16: (16, Outcome.UNRESOLVED),
            32: (16, Outcome.UNRESOLVED),  # 16 surely meets it
            None: (16, Outcome.UNRESOLVED),
        }
        message = at.choose_truncation(found, delta=0.1, k_max=32, k_now=4).message
        assert message == ("64 losses leave open which k between 2 and 16 meets delta=0.1; using 4")
        message = at.choose_truncation(found, delta=0.1, k_min=4, k_max=32, k_now=4).message
        assert "between 4 and 16 meets" in message  # what is left open begins at k_min

    def test_a_hidden_gradient_keeps_k_or_takes_the_largest(self):
        found = level_bias(made_up(np.zeros((7, 64)), geometric(0.7), groups=16))
        assert found.hidden
        choice = at.choose_truncation(found, delta=0.1, k_max=32, k_now=4)
        assert (choice.k, choice.outcome) == (4, Outcome.UNRESOLVED)
        assert choice.message == (
            "noise hides the gradient of 64 losses: it does not differ from zero with 90% "
            "confidence; using k=4"
        )
        assert math.isnan(choice.relative_bias)
        assert chosen(found) == (32, Outcome.UNRESOLVED)
        assert chosen(found, k_min=31, k_max=32)[1] is Outcome.UNRESOLVED  # nothing is chosen by it

    def test_a_curve_that_rises_again_is_met_only_after_its_last_rise(self):
        mean = np.zeros((7, 2))
        # What level 5 takes away level 3 had given: in between the gradient is wrong again.
        mean[0, 0], mean[3, 1], mean[5, 1] = 1.0, 1.0, -1.0
        found = level_bias(made_up(mean, np.full(7, 1e-4), groups=16))
        np.testing.assert_allclose(found.estimate, [0, 0, 0, 1, 1, 0, 0], atol=1e-3)
        assert chosen(found, delta=0.5) == (16, Outcome.MET)
        assert chosen(curve([0.0, 0.0, 0.0, 0.9, 0.9, 0.0, 0.0]), k_max=8) == (
            8,
            Outcome.BEYOND_MAXIMUM,
        )

    def test_a_gradient_from_far_back_is_seen_for_itself(self):
        mean = np.zeros((7, 64))
        mean[0], mean[5] = 1.0, np.tile([0.5, -0.5], 32)  # nothing between lag 0 and level 16
        found = level_bias(made_up(mean, np.full(7, 1e-5), groups=16))
        assert chosen(found) == (16, Outcome.MET)

    @given(st.integers(0, 300), st.floats(0.01, 0.98), st.floats(0.01, 0.98))
    @settings(max_examples=60, deadline=None)
    def test_k_does_not_grow_with_delta_and_is_a_level(self, seed, one, other):
        rng = np.random.default_rng(seed)
        noise = rng.uniform(0, 2) * geometric(0.8)
        sums = made_up(geometric(0.8)[:, None] * np.ones(8), noise, groups=12, rng=rng)
        found = level_bias(sums)
        small, large = sorted((one, other))
        ks = [chosen(found, delta=delta)[0] for delta in (small, large)]
        assert ks[0] >= ks[1]
        assert set(ks) <= set(CONTEXTS)

    def test_between_levels_the_shorter_context_holds(self):
        found = curve([0.8, 0.5, 0.3, 0.2, 0.15, 0.05, 0])
        assert found.relative_at(3) == 0.3
        assert found.relative_at(1000) == 0.0
        assert found.interval_at(15) == (0.15, 0.15)
        with pytest.raises(ValueError, match="got -1"):
            found.relative_at(-1)

    def test_limits_between_two_levels_use_the_largest_k(self):
        found = curve([0.8, 0.5, 0.3, 0.2, 0.05, 0.05, 0])
        assert chosen(found, k_min=9, k_max=12) == (12, Outcome.MET)

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"delta": 0.0}, "delta must be in"),
            ({"delta": 1.0}, "0.1 means 10 %"),
            ({"delta": 0.1, "k_min": -1}, "k_min must not be negative"),
            ({"delta": 0.1, "k_min": 9, "k_max": 8}, "k_min must not exceed k_max"),
        ],
    )
    def test_limits_are_checked(self, options, says):
        with pytest.raises(ValueError, match=says):
            Limits(**options)

    def test_a_log_holds_four_digits_and_none_for_what_is_not_known(self):
        hidden = level_bias(made_up(np.zeros((7, 64)), geometric(0.7), groups=16)).brief()
        assert hidden["contexts"] == list(CONTEXTS)
        assert hidden["bias"] == hidden["high"] == [None] * 7
        short = curve([1 / 3] * 7).brief()
        assert short["bias"] == [0.3333] * 7


class TestSums:
    def test_levels_are_zero_and_powers_of_two(self):
        assert levels_up_to(64) == (0, 1, 2, 4, 8, 16, 32, 64)
        assert levels_up_to(100, 3) == (0, 1, 2, 3, 4, 8, 16, 32, 64, 100)
        assert levels_up_to(1) == (0, 1)
        assert levels_up_to(0) == (0,)
        assert levels_up_to(5, 100) == (0, 1, 2, 4, 5)

    def test_joined_measurements_keep_their_order_and_say_what_all_missed(self):
        one = replace(made_up(np.ones((7, 2)), np.zeros(7), 3), unreached=("a", "b"))
        two = replace(made_up(2 * np.ones((7, 2)), np.zeros(7), 5), unreached=("b", "c"))
        both = LevelSums.concatenate([one, two])
        assert (both.groups, both.samples, both.unreached) == (8, 32, ("b",))
        np.testing.assert_array_equal(both.newest(5).vectors, two.vectors)
        np.testing.assert_array_equal(both.newest(99).vectors, both.vectors)
        assert both.newest(0).groups == 0
        other = made_up(np.ones((2, 2)), np.zeros(2), 3, contexts=(0, 1))
        with pytest.raises(ValueError, match="same contexts and losses"):
            LevelSums.concatenate([one, other])

    def test_what_is_saved_comes_back(self):
        sums = replace(made_up(np.ones((7, 2)), np.ones(7), 3), unreached=("head.bias",))
        again = LevelSums.from_dict(sums.to_dict())
        assert (again.contexts, again.losses, again.unreached) == (CONTEXTS, 1, ("head.bias",))
        np.testing.assert_array_equal(again.vectors, sums.vectors)
        np.testing.assert_array_equal(again.counts, sums.counts)

    def test_vectors_belong_to_contexts_from_zero_on(self):
        for contexts in ((0, 1), (1, 2, 3)):
            with pytest.raises(ValueError, match="contexts that begin with 0"):
                LevelSums(contexts, np.zeros((4, 3, 2), np.float32), np.ones(4), 1)


def test_what_single_windows_miss_is_a_ratio_of_root_mean_squares():
    contexts = (0, 1, 2, 4)
    vectors = np.random.default_rng(0).standard_normal((6, 4, 7))  # no mean: noise hides all
    found = level_bias(LevelSums(contexts, vectors.astype(np.float32), np.full(6, 10.0), 5))
    assert found.hidden
    missing = [np.square(vectors[:, j + 1 :].sum(1)).sum() for j in range(4)]
    whole = np.square(vectors.sum(1)).sum()
    np.testing.assert_allclose(found.single, np.sqrt(missing / whole), rtol=1e-5)
