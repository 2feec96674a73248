"""Theorem 2 against the inequality it is derived from, and against SGD itself."""

import math

import numpy as np
import pytest

from atbptt_paper.decay import theory

CASE = {"delta": 0.3, "lipschitz": 2.0, "sigma": 0.5, "gap": 1.5}


def test_the_optimum_is_the_minimum_of_the_general_bound():
    best = theory.optimal_constant_step(5000, **CASE)
    assert not best.capped
    assert best.bound == pytest.approx(theory.sgd_bound(np.full(5000, best.step_size), **CASE))
    for factor in (0.9, 1.1):
        assert theory.sgd_bound(np.full(5000, factor * best.step_size), **CASE) > best.bound
    assert best.bound == pytest.approx(math.sqrt(8 * 1.5 * 2 * 0.25 / 5000) / 0.7)


def test_few_steps_or_no_noise_meet_the_cap():
    for steps, sigma in ((2, 0.5), (1000, 0.0)):
        case = CASE | {"sigma": sigma}
        best = theory.optimal_constant_step(steps, **case)
        assert best.capped
        assert best.step_size == theory.step_size_cap(0.3, 2.0) == pytest.approx(0.7 / 2 / 1.69)
        assert best.bound == pytest.approx(theory.sgd_bound(np.full(steps, best.step_size), **case))


def test_steps_above_the_cap_have_no_bound():
    cap = theory.step_size_cap(0.3, 2.0)
    theory.sgd_bound([cap], **CASE)
    with pytest.raises(ValueError, match="exceeds the cap"):
        theory.sgd_bound([1.01 * cap], **CASE)


def test_the_price_is_the_ratio_of_bounds():
    steps = np.full(100, 0.01)
    free = theory.sgd_bound(steps, **(CASE | {"delta": 0.0}))
    assert theory.sgd_bound(steps, **CASE) == pytest.approx(theory.price_of_bias(0.3) * free)


def test_decaying_steps_converge_as_log_n_over_sqrt_n():
    values = [theory.sgd_bound(theory.decaying_steps(n, 0.1), **CASE) for n in (10**3, 10**5)]
    rate = [math.log(n) / math.sqrt(n) for n in (10**3, 10**5)]
    assert values[1] / values[0] == pytest.approx(rate[1] / rate[0], rel=0.5)
    assert values[1] < values[0]


def test_biased_sgd_on_a_quadratic_stays_below_the_bound():
    # f(x) = L x^2 / 2: the gradient is L x, the bias shrinks it by (1 - delta) every step.
    rng = np.random.default_rng(0)
    delta, lipschitz, sigma, x0, steps = 0.5, 2.0, 0.3, 3.0, 200
    gamma = 0.5 * theory.step_size_cap(delta, lipschitz)
    x = np.full(2000, x0)
    squares = []
    for _ in range(steps):
        squares.append(float(np.mean((lipschitz * x) ** 2)))
        noise = sigma * rng.standard_normal(x.shape)
        x = x - gamma * ((1 - delta) * lipschitz * x + noise)
    bound = theory.sgd_bound(
        np.full(steps, gamma),
        delta=delta,
        lipschitz=lipschitz,
        sigma=sigma,
        gap=lipschitz * x0**2 / 2,
    )
    assert min(squares) <= bound


def test_markov_holds_for_an_exponential_error():
    errors = np.random.default_rng(0).exponential(0.02, 100_000)
    assert (errors > 0.1).mean() <= theory.failure_probability(0.02, delta=0.1)
    assert theory.failure_probability(5.0, delta=0.1) == 1.0


@pytest.mark.parametrize("steps", [1, 10, 10**6])
def test_epsilon_per_step_compounds_to_the_total(steps):
    epsilon = theory.epsilon_per_step(0.05, steps)
    assert -math.expm1(steps * math.log1p(-epsilon)) == pytest.approx(0.05, rel=1e-9)
    assert theory.epsilon_per_step(0.05, steps, union=True) <= epsilon * (1 + 1e-12)


@pytest.mark.parametrize(
    "call",
    [
        lambda: theory.price_of_bias(1.0),
        lambda: theory.step_size_cap(0.5, 0.0),
        lambda: theory.sgd_bound([], **CASE),
        lambda: theory.sgd_bound([-1.0], **CASE),
        lambda: theory.optimal_constant_step(0, **CASE),
        lambda: theory.epsilon_per_step(1.0, 5),
        lambda: theory.failure_probability(-1.0, 0.5),
        lambda: theory.decaying_steps(3, 0.0),
    ],
)
def test_bad_constants(call):
    with pytest.raises(ValueError, match=r"must|exceeds"):
        call()
