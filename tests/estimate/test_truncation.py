"""Every outcome, and the sentence it carries."""

import numpy as np
import pytest

import adaptive_tbptt as at
from adaptive_tbptt.estimate import Outcome
from adaptive_tbptt.estimate.bias import smallest_k


def bias(beta, lags=100, norms=None, head=0):
    phi = np.concatenate([np.ones(head), beta ** np.arange(lags + 1.0 - head)])
    return at.bias_bound(phi, at.fit_decay(phi), norms)


@pytest.mark.parametrize(
    ("curve", "options", "k", "outcome", "says"),
    [
        (bias(0.8), {"delta": 0.1}, 11, Outcome.MET, "k=11 meets delta=0.1"),
        (bias(0.8), {"delta": 0.1, "k_max": 11}, 11, Outcome.MET, "k=11 meets delta=0.1"),
        (bias(0.5), {"delta": 0.9, "k_min": 2}, 2, Outcome.MET_AT_MINIMUM, "already at k_min=2"),
        (bias(0.8), {"delta": 0.1, "k_max": 5}, 5, Outcome.BEYOND_MAXIMUM, "no k up to 5"),
        (bias(0.999), {"delta": 0.1}, 100, Outcome.NO_BOUND, "no bound"),
        (bias(1.02), {"delta": 0.5}, 100, Outcome.NO_DECAY, "does not decay (beta=1.02 >= 1"),
        (bias(0.8, 12), {"delta": 0.1}, 11, Outcome.WINDOW_TOO_SHORT, "past tau=10"),
        (bias(0.95, 40), {"delta": 0.1}, 50, Outcome.WINDOW_TOO_SHORT, "measure more lags"),
        (bias(0.95, 40), {"delta": 0.1, "k_max": 45}, 45, Outcome.BEYOND_MAXIMUM, "50 would"),
        (bias(0.8, 12), {"delta": 0.1, "k_min": 20}, 20, Outcome.MET_AT_MINIMUM, "k_min=20"),
        (
            bias(0.8, norms=np.full(101, 1e-12)),
            {"delta": 0.5, "k_max": 50},
            50,
            Outcome.NO_BOUND,
            "using 50",
        ),
    ],
)
def test_outcomes(curve, options, k, outcome, says):
    choice = at.choose_truncation(curve, **options)
    assert (choice.k, choice.outcome) == (k, outcome)
    assert says in choice.message
    assert choice.outcome.met == (choice.relative_bias < options["delta"])
    assert choice.relative_bias == curve.relative_at(choice.k)


def test_beyond_the_maximum_names_the_k_that_would_do():
    choice = at.choose_truncation(bias(0.8), delta=0.1, k_max=5)
    assert choice.message == "no k up to 5 meets delta=0.1; 11 would; using 5"


def test_the_smallest_k_is_the_smallest():
    curve = bias(0.9, head=20)
    for delta in (0.9, 0.5, 0.1, 0.01):
        choice = at.choose_truncation(curve, delta=delta)
        assert curve.relative[choice.k] < delta <= curve.relative[choice.k - 1]


@pytest.mark.parametrize(("tau", "outcome"), [(11, Outcome.MET), (10, Outcome.WINDOW_TOO_SHORT)])
def test_a_k_up_to_tau_is_seen_for_itself(tau, outcome):
    phi = 0.8 ** np.arange(101.0)
    choice = at.choose_truncation(at.bias_bound(phi, at.fit_decay(phi, tau=tau)), delta=0.1)
    assert (choice.k, choice.outcome) == (11, outcome)


def test_a_k_max_at_the_window_does_not_look_beyond_it():
    choice = at.choose_truncation(bias(0.95, 40), delta=0.1, k_max=40)
    assert (choice.k, choice.outcome) == (40, Outcome.BEYOND_MAXIMUM)
    assert choice.message == "no k up to 40 meets delta=0.1; 50 would; using 40"
    assert choice.relative_bias == bias(0.95, 40).relative[40] >= 0.1


@pytest.mark.parametrize("gauge", [at.truncate.PaperGauge, at.truncate.ReleaseGauge])
def test_a_gauge_fits_with_its_own_tau_and_method_and_the_floor_of_the_profile(gauge):
    curve = 0.4 ** np.arange(101.0) * np.random.default_rng(0).lognormal(0, 0.3, 101)
    profile = at.estimate.LagProfile(
        curve[:, None], {"h": curve[:, None]}, curve[:, None], floor=1e-30
    )
    fit = gauge(tau=0.5, method="max").fit(profile)
    assert fit == gauge(tau=0.5, method="max").bias(profile).fit
    assert (fit.method, fit.tail, fit.last) == (
        "max",
        "underflow",
        np.flatnonzero(curve > 1e-30)[-1],
    )
    assert fit.tau == fit.last // 2
    steps = np.diff(np.log(curve[fit.tau : fit.last + 1]))
    assert fit.log_beta == pytest.approx(steps.max(), rel=1e-12)


def test_a_k_max_beyond_memory_costs_nothing():
    slow = np.array([-1e-9])
    assert smallest_k(np.zeros((6, 1)), slow, 0.1, 1, 10**12) == 5 + np.ceil(-np.log(0.1) / 1e-9)
    assert at.choose_truncation(bias(0.999), delta=0.1, k_max=10**12).k == 10**12  # no bound


def test_the_k_beyond_the_lags_is_that_of_a_search_over_all():
    rng = np.random.default_rng(0)
    for _ in range(200):
        log_relative = -np.sort(rng.exponential(size=(6, 3)).cumsum(0), axis=0)
        log_beta, delta = -rng.exponential(0.3, 3), float(rng.uniform(0.001, 0.9))
        k_min, k_max = int(rng.integers(0, 5)), int(rng.integers(5, 60))
        further = log_relative[-1] + np.arange(1, 100)[:, None] * log_beta
        met = np.vstack([log_relative, further]) < np.log(delta)
        expected = np.minimum(np.maximum(met.argmax(0), k_min), k_max + 1)
        expected[~met.any(0)] = k_max + 1
        found = smallest_k(log_relative, log_beta, delta, k_min, k_max)
        assert found.tolist() == expected.tolist()
