import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import adaptive_tbptt as at

curves = st.builds(
    lambda beta, seed, scale: (
        scale * beta ** np.arange(61.0) * np.random.default_rng(seed).lognormal(0, 0.3, 61)
    ),
    st.floats(0.3, 0.98),
    st.integers(0, 10_000),
    st.floats(1e-3, 1e3),
)


def by_definition(phi, fit):
    """E(K) as a plain sum: measured lags up to tau, then 5000 lags of the fitted decay."""
    tail = phi[fit.tau] * fit.beta ** np.arange(0, 5000)
    extended = np.concatenate([phi[: fit.tau], tail])
    return np.array([extended[k + 1 :].sum() for k in range(len(phi))])


@given(curves, st.sampled_from([0, 30, 0.9]))
def test_absolute_is_the_sum_of_all_lags_beyond(phi, tau):
    fit = at.fit_decay(phi, tau=tau)
    if fit.beta < 0.99:
        np.testing.assert_allclose(
            at.bias_bound(phi, fit).absolute, by_definition(phi, fit), rtol=1e-9
        )


@given(curves)
def test_relative_by_definition_in_both_readings(phi):
    fit = at.fit_decay(phi)
    if fit.beta > 0.99:
        return
    lost = by_definition(phi, fit)
    printed = np.maximum.accumulate(np.cumsum(phi) - lost)
    expected = np.where(printed > 0, lost / np.where(printed > 0, printed, 1), np.inf)
    np.testing.assert_allclose(at.bias_bound(phi, fit).relative, expected, rtol=1e-7)
    norms = np.cumsum(phi) * 0.7
    best = (norms - lost).max()
    expected = lost / best if best > 0 else np.full(61, np.inf)
    np.testing.assert_allclose(at.bias_bound(phi, fit, norms).relative, expected, rtol=1e-7)


@given(curves, st.booleans())
def test_the_bound_never_rises_with_k(phi, given_norms):
    norms = np.linspace(1, 2, 61) * phi.max() if given_norms else None
    relative = at.bias_bound(phi, at.fit_decay(phi), norms).log_relative
    assert (relative[1:] <= relative[:-1] + 1e-12).all()


@given(curves, st.floats(1e-3, 1e3))
def test_nothing_relative_depends_on_the_scale(phi, scale):
    one, two = (at.bias_bound(c * phi, at.fit_decay(c * phi)) for c in (1.0, scale))
    np.testing.assert_allclose(one.relative, two.relative, rtol=1e-6)


@given(curves, st.integers(1, 40))
def test_extending_the_curve_geometrically_changes_nothing(phi, more):
    fit = at.fit_decay(phi)
    shorter = phi.copy()
    shorter[fit.tau :] = phi[fit.tau] * fit.beta ** np.arange(61 - fit.tau)
    longer = np.concatenate([shorter, shorter[-1] * fit.beta ** np.arange(1, more + 1)])
    one, two = at.bias_bound(shorter, fit), at.bias_bound(longer, fit)
    np.testing.assert_allclose(one.relative, two.relative[:61], rtol=1e-9)
    if np.isfinite(one.relative[-1]):
        assert one.relative_at(60 + more) >= two.relative[-1] * (1 - 1e-9)


@given(curves, st.floats(0.01, 0.98), st.floats(0.01, 0.98))
def test_k_does_not_grow_with_delta(phi, a, b):
    bias = at.bias_bound(phi, at.fit_decay(phi))
    low, high = sorted((a, b))
    assert at.choose_truncation(bias, delta=low).k >= at.choose_truncation(bias, delta=high).k


def test_no_bound_where_the_gradient_does_not_decay():
    phi = 1.01 ** np.arange(51.0)
    bias = at.bias_bound(phi, at.fit_decay(phi))
    assert np.isinf(bias.absolute).all()
    assert np.isinf(bias.relative).all()


def test_both_cases_of_the_bound_agree_at_tau_minus_one():
    phi = np.random.default_rng(0).lognormal(size=31) * 0.8 ** np.arange(31)
    fit = at.fit_decay(phi, tau=20)
    bias = at.bias_bound(phi, fit)
    assert bias.absolute[19] == pytest.approx(phi[20] / (1 - fit.beta), rel=1e-12)
    assert bias.absolute[20] == pytest.approx(bias.absolute[19] * fit.beta, rel=1e-12)


def test_given_norms_count_at_every_k_and_the_bound_decays_on_beyond_the_window():
    k = np.arange(21.0)
    phi = 0.5**k  # E(k) = 0.5^(k+1) / (1 - 0.5) = 0.5^k
    norms = np.where(k == 8, 3.0, 0.1)
    bias = at.bias_bound(phi, at.fit_decay(phi), norms)
    best = 3.0 - 0.5**8
    np.testing.assert_allclose(bias.relative, 0.5**k / best, rtol=1e-10)
    assert bias.relative_at(30) == pytest.approx(0.5**30 / best, rel=1e-10)


@pytest.mark.parametrize("bad", [np.nan, -5.0, np.inf])
def test_what_is_no_norm_is_refused(bad):
    phi = 0.5 ** np.arange(11.0)
    fit = at.fit_decay(phi)
    broken = phi.copy()
    broken[3] = bad
    with pytest.raises(ValueError, match=r"phi must be finite norms, got .* at lag 3"):
        at.bias_bound(broken, fit)
    with pytest.raises(ValueError, match="gradient_norms must be finite norms"):
        at.bias_bound(phi, fit, broken)
    unseen = np.array([np.nan, *phi[1:]])
    assert np.isfinite(at.bias_bound(unseen, fit).absolute).all()
    with pytest.raises(ValueError, match="it counts lags"):
        at.bias_bound(phi, fit).relative_at(-1)
