import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import adaptive_tbptt as at


def noisy(lags=101, samples=16, beta=0.9, seed=0):
    rng = np.random.default_rng(seed)
    return beta ** np.arange(lags)[:, None] * rng.lognormal(0, 0.5, (lags, samples))


def pair_slopes(curve, lags):
    logs = np.log(curve)
    return np.array([(logs[j] - logs[i]) / (j - i) for i in lags for j in lags if j > i])


def test_the_three_estimators_against_all_pairs():
    curve = noisy().mean(axis=1)
    lags = range(80, 101)
    slopes = pair_slopes(curve, lags)
    weights = np.array([(j - i) ** 2 for i in lags for j in lags if j > i])
    ols = at.fit_decay(curve, tau=80)
    # Eq. ols_estimate_beta is the mean of pair slopes with weights (k - k')^2.
    assert ols.log_beta == pytest.approx((weights * slopes).sum() / weights.sum(), rel=1e-10)
    assert ols.log_beta == pytest.approx(np.polyfit(lags, np.log(curve[80:]), 1)[0], rel=1e-8)
    assert at.fit_decay(curve, 80, "max").log_beta == pytest.approx(slopes.max(), rel=1e-10)
    quantile = at.fit_decay(curve, 80, "quantile")
    assert quantile.log_beta == pytest.approx(np.quantile(slopes, 0.9), rel=1e-10)


def test_standard_error_is_that_of_the_regression():
    curve = noisy().mean(axis=1)
    fit = at.fit_decay(curve, tau=50)
    lags = np.arange(50, 101)
    _, cov = np.polyfit(lags, np.log(curve[50:]), 1, cov=True)
    assert fit.stderr == pytest.approx(np.sqrt(cov[0, 0]), rel=1e-6)


def test_samples_are_averaged_before_the_logarithm():
    phi = noisy()
    found = at.fit_decay(phi)
    assert found.beta == at.fit_decay(phi.mean(axis=1)).beta
    assert found.beta != at.fit_decay(np.exp(np.log(phi).mean(axis=1))).beta


def test_tau_is_a_lag_or_a_fraction():
    curve = noisy().mean(axis=1)
    assert at.fit_decay(curve, tau=0.9) == at.fit_decay(curve, tau=90)
    assert at.fit_decay(curve, tau=np.int64(90)).tau == 90
    assert at.fit_decay(curve[:11], tau=0.9).tau == 9


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("flushed", [False, True])
def test_underflow_slides_the_fit_to_where_the_format_resolves(dtype, flushed):
    tiny = float(np.finfo(dtype).tiny)
    with np.errstate(all="ignore"):
        exact = np.float128(10.0) ** (np.arange(401) * np.log10(np.float128(tiny)) / 200)
        curve = exact.astype(dtype).astype(np.float64)
    if flushed:
        curve[curve < tiny] = 0.0
    assert (curve[-150:] == 0).all()
    with np.errstate(all="raise", under="ignore"):
        fit = at.fit_decay(curve)
        choice = at.choose_truncation(at.bias_bound(curve, fit), delta=0.1)
    assert fit.tail == "underflow"
    assert fit.log_beta == pytest.approx(np.log(tiny) / 200, rel=1e-4)
    assert 100 < fit.tau < fit.last <= 200
    assert choice.outcome.met
    assert choice.k < 10


def test_denormals_to_the_end_are_underflow_too():
    # The last half stuck in float32's denormal range, no exact zero: noise, not decay.
    curve = np.concatenate([0.5 ** np.arange(120.0), np.full(120, 2.8e-45)])
    fit = at.fit_decay(curve)
    assert fit.tail == "underflow"
    assert fit.beta == pytest.approx(0.5, rel=1e-9)


def test_float64_far_below_the_floor_of_float32_is_a_measurement():
    fit = at.fit_decay(0.1 ** np.arange(201.0))
    assert (fit.tail, fit.tau, fit.last) == ("measured", 180, 200)
    assert fit.beta == pytest.approx(0.1, rel=1e-10)


def test_true_zeros_inside_the_fitted_range():
    curve = np.where(np.arange(101) < 95, 0.99 ** np.arange(101), 0.0)
    fit = at.fit_decay(curve)
    assert (fit.beta, fit.tau, fit.tail) == (0.0, 95, "zero")
    bias = at.bias_bound(curve, fit)
    assert bias.absolute[93] == pytest.approx(curve[94], rel=1e-12)
    assert bias.absolute[94] == 0.0


@given(st.floats(0.05, 1.5), st.floats(1e-6, 1e6))
def test_a_geometric_curve_gives_its_own_rate(beta, scale):
    for method in ("ols", "max", "quantile"):
        fit = at.fit_decay(scale * beta ** np.arange(41.0), method=method)
        assert fit.beta == pytest.approx(beta, rel=1e-9)
        assert fit.decays == (fit.beta < 1)


@given(st.floats(1e-5, 1e5))
def test_the_rate_does_not_depend_on_the_scale(scale):
    curve = noisy().mean(axis=1)
    assert at.fit_decay(scale * curve).log_beta == pytest.approx(at.fit_decay(curve).log_beta)


@pytest.mark.parametrize(
    ("beta", "shown"),
    [(0.5, "0.5"), (0.98765, "0.9877"), (0.9999642, "0.999964"), (1.0000023, "1.000002"),
     (1.0, "1"), (1.23456, "1.235"), (math.inf, "inf"), (0.0, "0")],
)  # fmt: skip
def test_the_printed_rate_tells_on_which_side_of_one_it_is(beta, shown):
    fit = replace(at.fit_decay([1.0, 0.5, 0.25]), beta=beta)
    assert fit.rate == shown


def test_a_fraction_of_the_window_is_rounded_down_but_not_by_rounding_errors():
    curve = 0.8 ** np.arange(103.0)
    assert at.fit_decay(curve, tau=0.9).tau == 91  # 0.9 * 102 = 91.8
    assert at.fit_decay(curve[:101], tau=0.29).tau == 29  # 0.29 * 100 is 28.999... in float64


def test_a_tau_close_to_the_end_of_a_short_curve_leaves_two_lags():
    for tau in (0.999, 1.0 - 1e-12):
        fit = at.fit_decay(0.8 ** np.arange(11.0), tau=tau)
        assert (fit.tau, fit.last, fit.lags) == (9, 10, 2)
        assert fit.beta == pytest.approx(0.8, rel=1e-12)


@pytest.mark.parametrize(
    ("tau", "first"), [(50, 50), (101, 101), (102, 26), (300, 76), (0.75, 76), (0.999, 101)]
)
def test_a_tau_that_underflow_left_in_place_is_kept_and_any_other_slides(tau, first):
    # float32 resolves down to 2^-126 * 2^23: lag 102 is the last above it.
    fit = at.fit_decay((0.5 ** np.arange(401.0)).astype(np.float32), tau=tau)
    assert (fit.tau, fit.last, fit.tail) == (first, 102, "underflow")
    assert fit.beta == pytest.approx(0.5, rel=1e-9)


@pytest.mark.parametrize("floor", [1e-30, None])
@pytest.mark.parametrize(("factor", "tail"), [(0.5e6, "underflow"), (2e6, "zero")])
def test_zeros_are_true_where_the_last_norm_is_a_million_times_the_floor(floor, factor, tail):
    smallest = factor * (2.0**-103 if floor is None else floor)
    curve = np.concatenate([smallest ** (np.arange(51) / 50), np.zeros(50)])
    assert at.fit_decay(curve, floor=floor).tail == tail


def test_zeros_in_between_are_left_out_and_tau_moves_past_them():
    curve = 0.9 ** np.arange(101.0)
    curve[[90, 91, 95]] = 0.0
    fit = at.fit_decay(curve)
    assert (fit.tau, fit.last, fit.lags, fit.tail) == (92, 100, 8, "measured")
    assert fit.beta == pytest.approx(0.9, rel=1e-12)


@pytest.mark.parametrize(("zeros", "first"), [(1, 89), (5, 85)])
def test_a_few_zeros_at_the_end_are_no_true_zeros(zeros, first):
    curve = 0.9 ** np.arange(101.0)
    curve[-zeros:] = 0.0
    fit = at.fit_decay(curve)
    assert (fit.tau, fit.last, fit.tail) == (first, 100 - zeros, "measured")
    assert fit.beta == pytest.approx(0.9, rel=1e-12)


def test_a_given_floor_is_not_guessed():
    curve = 10.0 ** (-0.4 * np.arange(101))  # 1e-40 looks like a denormal of float32
    assert at.fit_decay(curve).tail == "underflow"
    fit = at.fit_decay(curve, floor=2.0**-1022 * 2**52)
    assert (fit.tau, fit.last, fit.tail) == (90, 100, "measured")
    assert at.fit_decay(curve, floor=1e-20).last == 49


def test_a_floor_is_looked_for_in_the_samples_not_in_their_mean():
    # The mean of 20 samples, one of them float32's smallest number, is no number of float32.
    phi = noisy(201, 20, beta=0.5).astype(np.float32)
    assert phi.min() == 0.0
    fit = at.fit_decay(phi)
    assert fit == at.fit_decay(phi, floor=2.0**-126 * 2**23)
    assert fit.last < 110


def test_huge_growth_does_not_overflow():
    curve = [1e-300, 1e300]
    fit = at.fit_decay(curve, tau=0)
    assert fit.log_beta == pytest.approx(600 * np.log(10))
    assert np.isfinite(fit.beta)
    assert not fit.decays
    with np.errstate(all="raise"):
        assert np.isinf(at.bias_bound(curve, fit).relative).all()
