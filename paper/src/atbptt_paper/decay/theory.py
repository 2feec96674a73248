"""Theorem 2: what a relative bias of delta costs SGD, and the comparison with Chen and Luss.

L is the Lipschitz constant of the gradient, sigma^2 bounds the variance of the stochastic
gradient, `gap` is D_L = L(theta_1) - min L. Every bound is on the minimum over n = 1..N of
E||g(theta_n)||^2.
Step sizes are the ones really taken: with the paper's scaling that is gamma * sqrt(K).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


def price_of_bias(delta: float) -> float:
    """Return 1 / (1 - delta), the factor by which bias worsens the bound of Theorem 2.

    >>> price_of_bias(0.5)
    2.0
    """
    _check_delta(delta)
    return 1.0 / (1.0 - delta)


def step_size_cap(delta: float, lipschitz: float) -> float:
    """Return (1 - delta) / (L (1 + delta)^2), the largest step size that Theorem 2 allows.

    >>> step_size_cap(0.0, lipschitz=2.0)
    0.5
    """
    _check_delta(delta)
    _check_positive(lipschitz=lipschitz)
    return (1.0 - delta) / (lipschitz * (1.0 + delta) ** 2)


def sgd_bound(
    step_sizes: ArrayLike, *, delta: float, lipschitz: float, sigma: float, gap: float
) -> float:
    """Return (2 D_L + L sigma^2 sum gamma_n^2) / ((1 - delta) sum gamma_n).

    Args:
        step_sizes: `(N,)`, each at most the cap.
        delta: relative bias of the gradient.
        lipschitz: L.
        sigma: standard deviation of the stochastic gradient.
        gap: D_L.

    >>> sgd_bound([0.25, 0.25], delta=0.0, lipschitz=1.0, sigma=0.0, gap=1.0)
    4.0
    """
    steps = np.asarray(step_sizes, dtype=np.float64)
    _check_positive(gap=gap)
    cap = step_size_cap(delta, lipschitz)
    if steps.ndim != 1 or steps.size == 0 or not (steps > 0.0).all():
        raise ValueError("step_sizes must be a nonempty sequence of positive numbers")
    if steps.max() > cap * (1.0 + 1e-12):
        raise ValueError(
            f"step size {steps.max():.4g} exceeds the cap {cap:.4g} of Theorem 2 for "
            f"delta={delta:g}: there is no bound"
        )
    noise = lipschitz * sigma**2 * float(steps @ steps)
    return (2.0 * gap + noise) / ((1.0 - delta) * float(steps.sum()))


class ConstantStep(NamedTuple):
    """The best constant step size for a number of steps, and the bound it gives."""

    step_size: float
    bound: float
    capped: bool


def optimal_constant_step(
    steps: int, *, delta: float, lipschitz: float, sigma: float, gap: float
) -> ConstantStep:
    """Return min(sqrt(2 D_L / (N L sigma^2)), cap) and its bound.

    Below the cap the bound is sqrt(8 D_L L sigma^2 / N) / (1 - delta). The paper states it without
    the cap; where the optimum exceeds it, the cap and the general bound are what holds.

    >>> best = optimal_constant_step(10_000, delta=0.5, lipschitz=1.0, sigma=1.0, gap=2.0)
    >>> best.step_size, best.bound, best.capped
    (0.02, 0.08, False)
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    _check_positive(gap=gap)
    cap = step_size_cap(delta, lipschitz)
    variance = steps * lipschitz * sigma**2
    best = math.sqrt(2.0 * gap / variance) if variance > 0.0 else math.inf
    if best <= cap:
        bound = price_of_bias(delta) * math.sqrt(8.0 * gap * lipschitz * sigma**2 / steps)
        return ConstantStep(best, bound, capped=False)
    noise = lipschitz * sigma**2 * cap
    bound = price_of_bias(delta) * (2.0 * gap / (steps * cap) + noise)
    return ConstantStep(cap, bound, capped=True)


def decaying_steps(steps: int, gamma: float) -> NDArray[np.float64]:
    """Return gamma / sqrt(n) for n = 1..N, whose bound falls as log N / ((1 - delta) sqrt N).

    >>> decaying_steps(4, 1.0)[[0, 3]].tolist()
    [1.0, 0.5]
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    _check_positive(gamma=gamma)
    return gamma / np.sqrt(np.arange(1, steps + 1, dtype=np.float64))


def failure_probability(relative_error: float, delta: float) -> float:
    """Markov: an expected relative error of `relative_error` exceeds delta at most this often.

    Chen and Luss ask for Pr(||g_hat - g|| <= delta ||g||) > 1 - epsilon. It follows when the
    *expected* relative error E||g_hat - g|| / ||g|| is at most delta * epsilon. The supplement
    says 'relative bias' there; a small bias alone, under large variance, does not suffice.

    >>> failure_probability(0.125, delta=0.5)
    0.25
    """
    _check_positive(delta=delta)
    if relative_error < 0.0:
        raise ValueError(f"relative_error must not be negative, got {relative_error}")
    return min(1.0, relative_error / delta)


def epsilon_per_step(epsilon_total: float, steps: int, *, union: bool = False) -> float:
    """Return the per-step epsilon for which all N steps hold with probability 1 - epsilon_total.

    1 - (1 - epsilon_total)^(1/N) when the noise of the steps is independent; `union=True` gives
    Chen and Luss's simpler epsilon_total / N, which is smaller and needs no independence.

    >>> round(epsilon_per_step(0.05, 100), 7), epsilon_per_step(0.05, 100, union=True)
    (0.0005128, 0.0005)
    """
    if not 0.0 < epsilon_total < 1.0:
        raise ValueError(f"epsilon_total must be in (0, 1), got {epsilon_total}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if union:
        return epsilon_total / steps
    return -math.expm1(math.log1p(-epsilon_total) / steps)


def _check_delta(delta: float) -> None:
    if not 0.0 <= delta < 1.0:
        raise ValueError(f"delta must be in [0, 1), got {delta}: above 1 SGD need not converge")


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0.0:
            raise ValueError(f"{name} must be positive, got {value}")
