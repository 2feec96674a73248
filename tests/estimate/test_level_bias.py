"""The measured bias: against vectors whose means are known, and a model whose bias is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from adaptive_tbptt.estimate.contributions import Contributions
from adaptive_tbptt.estimate.measured_curve import cut_weights, gradient_norm, measured_bias
from torch import nn

import adaptive_tbptt as at
from adaptive_tbptt.diagnosis.bias_check import _compare
from adaptive_tbptt.estimate.truncation import is_resolved, open_range
from adaptive_tbptt.estimate.unbiased_norms import chance, quantile, squared_means


def made_up(mean, noise, groups, size=4, rng=None):
    """Contributions `(lags, groups, m)` with known means: c_k = mean[k] + noise[k] * normal."""
    rng = np.random.default_rng(0) if rng is None else rng  # whatever ran before
    lags, m = mean.shape
    samples = mean[:, None, None] + noise[:, None, None, None] * rng.standard_normal(
        (lags, groups, size, m)
    )
    return Contributions(
        np.linalg.norm(samples, axis=-1).reshape(lags, -1),
        samples.sum(axis=2).astype(np.float32),
        np.full(groups, size),
    )


def test_squared_mean_of_two_groups_by_hand():
    found = squared_means(np.array([[1.0, 2.0], [3.0, -1.0]]), np.array([1, 1]), blocks=1)
    assert found.value / found.pairs == pytest.approx(1 * 3 - 2 * 1)  # the one product of the two


def test_squared_means_are_unbiased_whatever_the_sizes_of_the_groups():
    mean, sizes, rng = (
        np.array([0.3, -0.1, 0.0, 0.2]),
        np.array([1, 5, 2, 7]),
        np.random.default_rng(0),
    )
    values = []
    for _ in range(4000):
        sums = np.stack([(mean + rng.standard_normal((n, 4))).sum(axis=0) for n in sizes])
        found = squared_means(sums, sizes)
        values.append(found.value / found.pairs)
    error = np.std(values) / np.sqrt(len(values))
    assert abs(np.mean(values) - mean @ mean) < 4 * error
    assert np.mean(values) < 0.5 * (mean @ mean + 4 / sizes.sum())  # what a plain norm would give


def test_leaving_a_group_out_is_what_the_others_give():
    v, sizes = np.random.default_rng(0).standard_normal((3, 5, 32)), np.array([2, 3, 1, 4, 2])
    found = squared_means(v, sizes)
    for g in range(5):
        rest = [i for i in range(5) if i != g]
        alone = squared_means(v[:, rest], sizes[rest])
        np.testing.assert_allclose(
            found.without_group[:, g] / found.pairs, alone.value / alone.pairs, rtol=1e-9
        )


@pytest.mark.parametrize(("level", "nu", "expected"), [(0.95, 7, 1.8946), (0.975, 15, 2.1314)])
def test_quantile_is_students(level, nu, expected):
    assert quantile(level, nu + 1) == pytest.approx(expected, rel=2e-3)


def test_chance_is_uniform_without_a_mean_and_small_with_one():
    rng = np.random.default_rng(1)
    none = [chance(rng.standard_cauchy((10, 3)), flips=200, seed=i) for i in range(300)]
    assert 0.02 < np.mean(np.array(none) <= 0.1) < 0.2
    assert chance(1.0 + 0.1 * rng.standard_normal((10, 3))) < 0.01


def test_known_bias_is_measured_and_covered():
    lags, m = 30, 256
    rng = np.random.default_rng(2)
    mean = 0.8 ** np.arange(lags)[:, None] * rng.standard_normal((lags, m)) / np.sqrt(m)
    tails = np.array([np.linalg.norm(mean[k + 1 :].sum(axis=0)) for k in range(lags)])
    true = tails / np.linalg.norm(mean.sum(axis=0))
    covered, values = [], []
    for _ in range(40):
        c = made_up(mean, 0.3 * 0.8 ** np.arange(lags), groups=32, rng=rng)
        curve = measured_bias(c, at.fit_decay(c.mean, tau=0.5), level=0.9)
        beyond = curve.estimate[-1]
        values.append(curve.estimate[:10] - beyond)
        covered.append((curve.low[:10] <= true[:10] + 1e-6) & (true[:10] <= curve.high[:10]))
    np.testing.assert_allclose(np.mean(values, axis=0), true[:10], rtol=0.05)
    assert np.mean(covered) > 0.85
    few = made_up(mean, 0.3 * 0.8 ** np.arange(lags), groups=8, rng=rng)
    biased = np.linalg.norm(few.sketches[11:].sum(axis=0).mean(axis=0)) / 4
    assert biased > 1.2 * tails[10]  # without the correction noise looks like bias


def test_noise_alone_hides_the_gradient():
    c = made_up(np.zeros((10, 64)), 0.7 ** np.arange(10), groups=16)
    curve = measured_bias(c, at.fit_decay(c.mean, tau=0.5))
    assert curve.hidden
    assert np.isinf(curve.high).all()
    choice = at.choose_truncation(curve, delta=0.1, k_max=9, k_now=4)
    assert (choice.k, choice.outcome) == (4, at.estimate.Outcome.UNRESOLVED)
    assert "noise hides the gradient" in choice.message
    assert at.choose_truncation(curve, delta=0.1, k_max=9).k == 9
    narrow = at.choose_truncation(curve, delta=0.1, k_min=8, k_max=9)  # nothing is chosen by it
    assert narrow.outcome is at.estimate.Outcome.UNRESOLVED
    assert gradient_norm(c, 0.9)[1] == 0.0


def test_k_in_use_is_left_only_as_far_as_the_evidence_demands():
    mean = 0.8 ** np.arange(40)[:, None] * np.ones((40, 64)) / 8
    c = made_up(mean, 1.5 * 0.8 ** np.arange(40), groups=16)
    curve = measured_bias(c, at.fit_decay(c.mean, tau=0.5))
    assert not curve.hidden
    open_ks = [at.choose_truncation(curve, delta=0.2, k_max=39, k_now=k).k for k in (1, 8, 39)]
    assert (
        at.choose_truncation(curve, delta=0.2, k_max=39).outcome is at.estimate.Outcome.UNRESOLVED
    )
    assert open_ks[0] > 1
    assert open_ks[0] <= open_ks[1] <= open_ks[2] < 39


def test_what_is_left_open_begins_at_k_min():
    mean = 0.8 ** np.arange(40)[:, None] * np.ones((40, 64)) / 8
    c = made_up(mean, 3.0 * 0.8 ** np.arange(40), groups=16)
    curve = measured_bias(c, at.fit_decay(c.mean, tau=0.5))
    low, high = open_range(curve, 0.1, 1, 39)
    assert is_resolved(low, high) is False
    choice = at.choose_truncation(curve, delta=0.1, k_min=low + 1, k_max=39)
    assert f"between {low + 1} and {high} meets" in choice.message


def test_curve_that_rises_again_is_met_only_after_its_last_rise():
    mean = np.zeros((20, 64))
    mean[0, 0], mean[3, 1], mean[9, 1] = 1.0, 1.0, -1.0  # what lag 9 takes away lag 3 had given
    c = made_up(mean, np.full(20, 1e-4) * 0.5 ** np.arange(20), groups=16)
    curve = measured_bias(c, at.fit_decay(c.mean, tau=0.8))
    assert curve.estimate[2] < 0.1 < curve.estimate[5]
    assert at.choose_truncation(curve, delta=0.5, k_max=19).k == 9


def test_what_the_window_saw_is_not_put_down_to_the_fit():
    mean = np.full((40, 64), 1e-6) * 0.5 ** np.arange(40)[:, None]
    mean[0], mean[30] = 1.0, np.tile([0.5, -0.5], 32)  # needed far past tau, and measured there
    c = made_up(mean, 1e-5 * 0.5 ** np.arange(40), groups=16)
    choice = at.choose_truncation(
        measured_bias(c, at.fit_decay(0.5 ** np.arange(40.0), tau=0.5)), delta=0.1, k_max=39
    )
    assert (choice.k, choice.outcome) == (30, at.estimate.Outcome.MET)


@pytest.mark.parametrize("losses", [None, 1, 4, 1.0, 0.5, 0.3])
def test_cut_weights_are_what_a_training_window_misses(losses):
    window, k = 12, 5
    k2 = at.AdaptiveTBPTT(
        nn.GRU(1, 1), nn.MSELoss(), at.FixedTruncation(k), losses=losses or 1
    ).losses_per_window(k)
    missing = np.zeros(window)
    for j in range(k2):  # the loss j steps after the first of a window sees lags 0..k + j
        missing[k + j + 1 :] += 1 / k2
    np.testing.assert_allclose(cut_weights(window, losses)[k], missing)


class Sum(nn.Module):
    """h_t = a h_{t-1} + w x_t: every gradient can be written down."""

    def __init__(self, a: float) -> None:
        super().__init__()
        self.a, self.w = a, nn.Linear(1, 1, bias=False)

    def forward(self, inputs, state=None):
        h = inputs.new_zeros(inputs.shape[1], 1) if state is None else state
        out = []
        for x in inputs:
            h = self.a * h + self.w(x)
            out.append(h)
        return torch.stack(out), h


def test_bias_of_a_linear_recurrence_has_a_closed_form():
    """x = 1 always, loss = mean of h: c_k = a^k, so the relative bias at K is a^(K+1)."""
    a, model = 0.8, Sum(0.8)
    inputs = torch.ones(400, 16, 1)

    def loss_fn(outputs, targets):
        return (outputs - 0.0 * targets).mean()

    stream = at.SequenceStream(inputs, torch.zeros(400, 16, 1))
    profile = at.probe(model, loss_fn, inputs[:60], torch.zeros(60, 16, 1), sketch=64)
    found = at.truncate.MeasuredGauge().bias(profile)
    expected = a ** np.arange(1, 41)
    np.testing.assert_allclose(found.estimate[:40], expected, rtol=1e-4)
    np.testing.assert_allclose(found.high[:40], expected, rtol=1e-4)
    bound = at.truncate.ParameterGauge().bias(profile)  # all of one sign: the bound is exact
    np.testing.assert_allclose(bound.relative[:20], expected[:20], rtol=1e-3)
    for check in at.check_bias(model, loss_fn, stream, [3, 10], lags=80, segments=8):
        assert check.relative == pytest.approx(a ** (check.k + 1), rel=1e-3)
    (window,) = at.check_bias(model, loss_fn, stream, 5, losses=5, lags=80, segments=8, steps=5)
    curve = measured_bias(profile.contributions, found.fit, losses=5)
    assert window.relative == pytest.approx(np.mean(a ** np.arange(6.0, 11.0)), rel=1e-3)
    assert curve.estimate[5] == pytest.approx(window.relative, rel=1e-3)


def test_check_and_gauge_agree_on_a_model_that_neither_knows():
    torch.manual_seed(4)
    model = nn.GRU(2, 6)
    inputs = torch.randn(600, 32, 2)
    targets = torch.cumsum(inputs, 0)[..., :1].tanh().expand(-1, -1, 6)
    stream = at.SequenceStream(inputs, targets)
    loss_fn = nn.functional.mse_loss
    profiles = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        segment = stream.random_segment(50, generator)
        profiles.append(
            at.probe(model, loss_fn, segment.inputs, segment.targets, sketch=512, burn_in=10)
        )
    curve = at.truncate.MeasuredGauge().bias(at.estimate.LagProfile.concatenate(profiles))
    for check in at.check_bias(model, loss_fn, stream, [1, 2, 4], lags=40, segments=16):
        assert check.low <= curve.high[check.k]
        assert curve.low[check.k] <= check.high


@pytest.mark.filterwarnings("ignore::adaptive_tbptt.TruncationWarning")
def test_controller_asks_until_resolved_and_remembers(double):
    torch.manual_seed(0)
    model = nn.RNN(2, 4)
    data = torch.randn(300, 4, 2), torch.randn(300, 4, 4)
    gauge = at.truncate.MeasuredGauge(
        size=64, probes=at.truncate.ProbeBudget(fresh=2, budget=5, remembered=3)
    )
    rule = at.BiasTolerance(0.1, k_max=30, lags=30, k_init=7, gauge=gauge)
    tbptt = at.AdaptiveTBPTT(model, nn.functional.mse_loss, at.truncate.Bucketed(rule), burn_in=5)
    stream = at.SequenceStream(*data)
    tbptt.estimate(stream)
    first = tbptt.probed_steps // 35
    assert 2 <= first <= 5
    assert not tbptt.truncation.wants_more
    for _ in range(6):
        tbptt.estimate(stream)
    inner = tbptt.truncation.inner
    assert inner is not None
    assert len(inner.evidence) <= 3 + 5
    saved = tbptt.state_dict()
    again = at.AdaptiveTBPTT(model, nn.functional.mse_loss, at.truncate.Bucketed(rule), burn_in=5)
    again.load_state_dict(saved)
    again.estimate(stream)
    tbptt.estimate(stream)
    assert again.history == tbptt.history


def test_evidence_merged_by_probe_says_the_same_with_known_means():
    rng, lags = np.random.default_rng(5), np.arange(12)
    mean = 0.6 ** lags[:, None] * np.ones(64)
    probes = [made_up(mean, 2.0 * 0.6**lags, groups=8, rng=rng) for _ in range(24)]
    merged = Contributions.concatenate([c.merged() for c in probes])
    assert merged.sketches.shape == (12, 24, 64)
    assert list(merged.sizes) == [32] * 24
    curve = measured_bias(merged, at.fit_decay(merged.mean, 0.5))
    true = 0.6 ** (lags + 1.0)  # of a geometric series, up to the end of the window
    assert (curve.low[:6] <= true[:6]).all()
    assert (true[:6] <= curve.high[:6]).all()
    whole = Contributions.concatenate(probes)
    fine = measured_bias(whole, at.fit_decay(whole.mean, 0.5))
    np.testing.assert_allclose(curve.estimate[:6], fine.estimate[:6], rtol=0.1)


@pytest.mark.filterwarnings("ignore::adaptive_tbptt.TruncationWarning")
@pytest.mark.parametrize(("probes", "groups"), [((1, 1, 0), 4), ((8, 8, 3), 1)])
def test_groups_inside_a_probe_are_kept_only_while_they_are_needed(double, probes, groups):
    torch.manual_seed(0)
    model, data = nn.RNN(2, 4), (torch.randn(300, 4, 2), torch.randn(300, 4, 4))
    gauge = at.truncate.MeasuredGauge(size=64, probes=at.truncate.ProbeBudget(*probes))
    rule = at.BiasTolerance(0.1, k_max=20, lags=20, gauge=gauge)
    tbptt = at.AdaptiveTBPTT(model, nn.functional.mse_loss, rule, burn_in=5)
    tbptt.estimate(at.SequenceStream(*data))
    assert {len(c.sizes) for c in tbptt.truncation.evidence} == {groups}
    assert {c.norms.shape[1] for c in tbptt.truncation.evidence} == {4}


def test_what_is_said_of_a_changed_k_rests_on_all_evidence():
    rule = at.BiasTolerance(0.1, k_max=9, lags=10, k_init=5, gauge=at.truncate.MeasuredGauge())
    wrapped = at.truncate.Bucketed(at.truncate.RateLimited(rule), (8, 9))
    control, rng = wrapped.init(), np.random.default_rng(1)
    probes = 0
    while probes < 4 or control.wants_more:
        c = made_up(np.zeros((10, 64)), 0.7 ** np.arange(10), groups=8, rng=rng)
        profile = at.estimate.LagProfile(np.ones((11, 32)), {}, np.zeros((11, 1)), contributions=c)
        control, probes = wrapped.update(control, profile), probes + 1
    assert control.k == 8
    assert f"{32 * probes} samples" in control.decision.message
    assert control.decision.outcome is at.estimate.Outcome.UNRESOLVED
    assert wrapped.norms(control, profile).shape == (10, 32 * probes)


def test_a_gradient_in_one_coordinate_is_not_taken_for_a_limit_of_nan():
    rng = np.random.default_rng(0)
    for _ in range(300):  # heavy tails, few numbers in a sketch
        z = rng.standard_t(2, (3, 8, 16)) * 0.2
        z[:, :, 0] += 1.0
        c = Contributions(np.ones((3, 32)), z.astype(np.float32), np.full(8, 4))
        assert np.isfinite(gradient_norm(c, 0.9)).all()


def test_a_check_with_too_few_segments_is_refused():
    data = torch.randn(60, 2, 2), torch.zeros(60, 2, 3)
    for level, needed in ((0.9, 6), (0.99, 9)):
        with pytest.raises(ValueError, match=f"at least {needed} segments"):
            at.check_bias(
                nn.RNN(2, 3), nn.functional.mse_loss, data, 2, lags=10, segments=needed - 1,
                level=level,
            )  # fmt: skip
        at.check_bias(
            nn.RNN(2, 3), nn.functional.mse_loss, data, np.int64(2), lags=10, segments=needed,
            level=level,
        )  # fmt: skip
    with pytest.raises(ValueError, match="losses must be positive"):
        at.truncate.MeasuredGauge(losses=0)


def test_gauge_without_contributions_says_what_is_missing():
    profile = at.probe(
        nn.RNN(2, 3), nn.functional.mse_loss, torch.randn(20, 2, 2), torch.zeros(20, 2, 3)
    )
    with pytest.raises(ValueError, match="parameters=True"):
        at.truncate.MeasuredGauge().bias(profile)
    with pytest.raises(ValueError, match="fresh"):
        at.truncate.MeasuredGauge(probes=at.truncate.ProbeBudget(5, 2))


def test_bound_that_noise_hides_asks_for_more_and_uses_k_max():
    c = made_up(np.zeros((20, 64)), 0.7 ** np.arange(20), groups=16)
    profile = at.estimate.LagProfile(np.ones((21, 64)), {}, np.zeros((21, 1)), contributions=c)
    choice = at.choose_truncation(
        at.truncate.ParameterGauge().bias(profile), delta=0.1, k_max=15, k_now=4
    )
    assert (choice.k, choice.outcome) == (15, at.estimate.Outcome.UNRESOLVED)


@pytest.mark.parametrize("strength", [0.5, 0.8, 3.0])
def test_limits_of_a_check_are_wrong_no_more_often_than_they_say(strength):
    # A mean of this length in noise; the cut is half of it. At 0.5 a sixth is told from noise.
    rng, sizes = np.random.default_rng(0), np.ones(16, np.int64)
    mean = strength * np.eye(30)[0]
    found = []
    for _ in range(200):
        noise = rng.normal(size=(16, 30))
        whole, cut = mean + noise, 0.5 * mean + 0.1 * noise[:, ::-1]
        options = {"k": 1, "losses": 1, "level": 0.9, "samples": 16, "window": 9}
        found.append(_compare(whole.astype("f4"), cut.astype("f4"), sizes, **options))
    assert sum(check.high < 0.5 for check in found) <= 15  # 10 at most, and luck
    assert sum(check.low > 0.5 for check in found) <= 15
    assert strength < 3.0 or all(math.isfinite(check.high) for check in found)
