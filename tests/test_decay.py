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
    quantile = at.fit_decay(curve, 80, "quantile", alpha=0.2)
    assert quantile.log_beta == pytest.approx(np.quantile(slopes, 0.8), rel=1e-10)
    release = at.fit_decay(curve, 80, "max", pairs="tau")
    against_tau = (np.log(curve[81:]) - np.log(curve[80])) / np.arange(1, 21)
    assert release.log_beta == pytest.approx(against_tau.max(), rel=1e-10)


def test_standard_error_is_that_of_the_regression():
    curve = noisy().mean(axis=1)
    fit = at.fit_decay(curve, tau=50)
    lags = np.arange(50, 101)
    _, cov = np.polyfit(lags, np.log(curve[50:]), 1, cov=True)
    assert fit.stderr == pytest.approx(np.sqrt(cov[0, 0]), rel=1e-6)


def test_averaging_before_and_after_the_logarithm():
    phi = noisy()
    before, after = at.fit_decay(phi), at.fit_decay(phi, average="after")
    assert before.beta == at.fit_decay(phi.mean(axis=1)).beta
    assert after.beta == pytest.approx(at.fit_decay(np.exp(np.log(phi).mean(axis=1))).beta)
    assert before.beta != after.beta


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
