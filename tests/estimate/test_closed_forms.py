"""Models whose gradients are known on paper, in float64 to 1e-10."""

import itertools
import math

import numpy as np
import pytest
import torch

import adaptive_tbptt as at

from ..oracle import LinearRNN, along

pytestmark = pytest.mark.usefixtures("double")


def orthogonal(n: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(n, n))[0]


def no_reset(steps: int, rows: int, dims: int) -> torch.Tensor:
    x = torch.randn(steps, rows, dims + 1)
    x[..., -1] = 0.0
    return x


@pytest.mark.parametrize("rho", [0.3, 0.9, 0.99])
def test_scaled_orthogonal_recurrence_decays_at_exactly_rho(rho):
    v = torch.randn(5)
    model = LinearRNN(rho * orthogonal(5))
    x = no_reset(60, 3, 5)
    profile = at.probe(model, along(v), x, torch.zeros(60, 3), burn_in=10)
    expected = rho ** np.arange(51.0)[:, None] * float(v.norm()) * np.ones(3)
    np.testing.assert_allclose(profile.state_norms, expected, rtol=1e-10)
    fit = at.fit_decay(profile.mean)
    assert fit.beta == pytest.approx(rho, rel=1e-10)
    for method in ("max", "quantile"):
        assert at.fit_decay(profile.mean, method=method).beta == pytest.approx(rho, rel=1e-10)
    assert (fit.tau, fit.lags) == (45, 6)


@pytest.mark.parametrize("rho", [0.3, 0.9])
@pytest.mark.parametrize("delta", [0.9, 0.5, 0.1])
def test_k_of_the_geometric_curve_by_hand(rho, delta):
    # E(K) = rho^(K+1)/(1-rho); S_K = (1-rho^(K+1))/(1-rho); their difference grows with K, so
    # Delta(K) = r / (1 - 2 r) with r = rho^(K+1), below delta once r < delta / (1 + 2 delta).
    phi = 7.0 * rho ** np.arange(201.0)
    choice = at.choose_truncation(at.bias_bound(phi, at.fit_decay(phi)), delta=delta, k_max=200)
    by_hand = max(math.floor(math.log(delta / (1 + 2 * delta)) / math.log(rho)), 1)
    assert choice.k == by_hand
    r = rho ** (by_hand + 1)
    assert choice.relative_bias == pytest.approx(r / (1 - 2 * r), rel=1e-10)


def test_k_with_given_gradient_norms_by_hand():
    # Every k of the window bounds ||g||: with ||E g_k|| = 2 for all k the denominator is
    # 2 - E(window), whatever K is.
    rho, phi = 0.8, 0.8 ** np.arange(101.0)
    curve = at.bias_bound(phi, at.fit_decay(phi), gradient_norms=np.full(101, 2.0))
    tail = rho ** (np.arange(101.0) + 1) / (1 - rho)
    np.testing.assert_allclose(curve.absolute, tail, rtol=1e-10)
    np.testing.assert_allclose(curve.relative, tail / (2.0 - tail[-1]), rtol=1e-10)


def test_nilpotent_recurrence_ends_exactly_though_its_norms_grow_first():
    index = 6
    weight = torch.zeros(index, index)
    for i in range(index - 1):
        weight[i + 1, i] = 3.0  # ||W|| = 3, W^6 = 0
    v = torch.zeros(index)
    v[-1] = 1.0
    profile = at.probe(LinearRNN(weight), along(v), no_reset(40, 2, index), torch.zeros(40, 2))
    expected = [3.0**k if k < index else 0.0 for k in range(41)]
    np.testing.assert_allclose(profile.mean, expected, rtol=1e-10)
    fit = at.fit_decay(profile.mean)
    assert (fit.beta, fit.tail) == (0.0, "zero")
    assert not profile.underflowed.any()
    choice = at.choose_truncation(at.bias_bound(profile.mean, fit), delta=0.01)
    assert choice.k == index - 1
    assert choice.relative_bias == 0.0


def test_resetting_recurrence_has_beta_of_one_minus_p_times_lambda():
    # Every pattern of resets over 8 steps is a row of its own; weighted by its probability the
    # mean over rows is the exact expectation, ((1-p) lambda)^k ||v||.
    steps, p, stretch = 8, 0.3, 1.25
    patterns = torch.tensor(list(itertools.product([0.0, 1.0], repeat=steps))).T
    rows = patterns.shape[1]
    x = torch.randn(steps, rows, 4)
    x[..., -1] = patterns
    # The last step must not reset, or there is no loss: condition on it.
    x[-1, :, -1] = 0.0
    v = torch.randn(3)
    profile = at.probe(
        LinearRNN(stretch * orthogonal(3)),
        along(v),
        x,
        torch.zeros(steps, rows),
        state=torch.randn(rows, 3),
    )
    resets = patterns[:-1].sum(dim=0).numpy()
    weights = p**resets * (1 - p) ** (steps - 1 - resets)
    expectation = profile.state_norms @ (weights / weights.sum())
    beta = (1 - p) * stretch
    # Lag 1 passes the last step, where the reset is conditioned away; later lags each one chance.
    lags = np.arange(1, steps + 1)
    np.testing.assert_allclose(
        expectation[1:], stretch * beta ** (lags - 1.0) * float(v.norm()), rtol=1e-10
    )
    assert at.fit_decay(expectation[1:], tau=0).beta == pytest.approx(beta, rel=1e-10)
    assert beta < 1 < stretch
