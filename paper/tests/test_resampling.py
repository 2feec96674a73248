import dataclasses

import numpy as np
import pytest

import adaptive_tbptt as at
from atbptt_paper.decay import bootstrap


def noisy(samples, seed=0, lags=101, beta=0.9):
    rng = np.random.default_rng(seed)
    return beta ** np.arange(lags)[:, None] * rng.lognormal(0, 0.7, (lags, samples))


def run(phi, **options):
    return bootstrap(phi, at.fit_decay(phi, tau=0.7), deltas=(0.5, 0.1), **options)


@pytest.mark.parametrize("method", ["ols", "max", "quantile"])
def test_one_resample_at_a_time_gives_the_same_numbers(method):
    phi = noisy(20)
    options = {"tau": 0.7, "method": method}
    many = bootstrap(phi, at.fit_decay(phi, **options), deltas=(0.1,), resamples=50, seed=3)
    betas, ks, relatives = [], [], []
    for weights in np.random.default_rng(3).multinomial(20, np.full(20, 1 / 20), 50):
        drawn = np.repeat(phi, weights, axis=1)
        fit = at.fit_decay(drawn, **options)
        bias = at.bias_bound(drawn.mean(axis=1), fit)
        betas.append(fit.beta)
        ks.append(at.choose_truncation(bias, delta=0.1).k)
        relatives.append(bias.relative)
    assert many.beta == pytest.approx(tuple(np.quantile(betas, [0.025, 0.975])))
    assert many.k[0.1] == pytest.approx(tuple(np.quantile(ks, [0.025, 0.975])))
    ordered = np.sort(relatives, axis=0)
    np.testing.assert_allclose(many.relative, ordered[[1, 48]], rtol=1e-9)


def test_more_samples_narrow_the_intervals():
    few, many = run(noisy(16)), run(noisy(1024))
    for get in (lambda u: u.beta, lambda u: u.k[0.1], lambda u: u.relative[:, 20]):
        assert np.diff(get(many)) < np.diff(get(few)) / 2


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    # E of the lognormal factor is the same at every lag, so the true rate is beta.
    found = [run(noisy(64, seed), resamples=200).beta for seed in range(100)]
    hits = sum(low < 0.9 < high for low, high in found)
    assert 85 <= hits <= 100


def test_seeded():
    phi = noisy(16)
    assert run(phi, seed=1).beta == run(phi, seed=1).beta != run(phi, seed=2).beta


def test_unbounded_and_zero_curves_are_no_trouble():
    with np.errstate(all="raise"):
        growing = noisy(16, beta=1.05)
        u = bootstrap(growing, at.fit_decay(growing), deltas=(0.1,), k_max=50)
        assert u.k[0.1] == (50, 50)
        assert np.isinf(u.relative).all()
        ends = noisy(16)
        ends[30:] = 0.0
        u = bootstrap(ends, at.fit_decay(ends), deltas=(0.1,))
        assert u.beta == (0.0, 0.0)
        assert u.relative[1, 40] == 0.0


def resampled(phi, fit, resamples, seed):
    """The twin: mean curve and least-squares slope of every resample, on the lags of the fit."""
    samples = phi.shape[1]
    lags = [k for k in range(fit.tau, fit.last + 1) if phi[k].any()]
    for w in np.random.default_rng(seed).multinomial(
        samples, np.full(samples, 1 / samples), resamples
    ):
        mean = np.repeat(phi, w, axis=1).mean(axis=1)
        yield mean, np.polyfit(lags, np.log(mean[lags]), 1)[0]


def underflowing():
    return noisy(20, beta=0.3).astype(np.float32).astype(np.float64)


def with_zeros():
    phi = noisy(20)
    phi[[70, 71, 80, 100]] = 0.0
    return phi


@pytest.mark.parametrize("make", [underflowing, with_zeros])
def test_the_lags_are_those_of_the_fit(make):
    phi = make()
    fit = at.fit_decay(phi, tau=0.7)
    assert fit.last < 100
    found = bootstrap(phi, fit, resamples=60, seed=4).beta
    betas = [np.exp(slope) for _, slope in resampled(phi, fit, 60, 4)]
    assert found == pytest.approx(tuple(np.quantile(betas, [0.025, 0.975])), rel=1e-8)


def test_given_gradient_norms_are_divided_by():
    phi = noisy(20)
    fit = at.fit_decay(phi, tau=0.7)
    norms = np.linspace(20.0, 5.0, 101)
    found = bootstrap(phi, fit, deltas=(0.1,), gradient_norms=norms, resamples=41, seed=4)
    curves = []
    for mean, slope in resampled(phi, fit, 41, 4):
        lost = at.bias_bound(mean, dataclasses.replace(fit, log_beta=slope)).absolute
        curves.append(lost / (norms - lost).max())
    np.testing.assert_allclose(found.relative, np.sort(curves, axis=0)[[1, 39]], rtol=1e-8)
    ks = [np.argmax(curve < 0.1) for curve in curves]
    assert found.k[0.1] == pytest.approx(tuple(np.quantile(ks, [0.025, 0.975])))


def test_a_single_sample_cannot_be_resampled():
    with pytest.raises(ValueError, match="at least two samples"):
        bootstrap(np.ones((11, 1)), at.fit_decay(0.5 ** np.arange(11.0)))
