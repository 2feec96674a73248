"""||E v||^2 from noisy samples of v: the norm of a mean is biased upwards, this estimate is not.

The squared norm of a sum of independent vectors, less their own squared norms, is a sum of products
of different vectors. The mean of each product is ||E v||^2: a U-statistic. All functions take the
Gram matrix of the vectors, so the cost does not depend on their length.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Jackknife(NamedTuple):
    """Estimates `(...)`, and those without each group of samples `(..., groups)`."""

    value: Array
    without_group: Array


def squared_means(gram: Array, sizes: Array) -> Jackknife:
    """Estimate ||E v||^2 from the inner products of sums over independent groups of samples.

    Args:
        gram: `(..., groups, groups)`, inner products of the groups' sums.
        sizes: `(groups,)`, samples in each group.
    """
    size = np.asarray(sizes, dtype=np.float64)
    own = np.diagonal(gram, axis1=-2, axis2=-1)
    across = gram.sum(axis=-1) - own  # of each group with all others
    total = across.sum(axis=-1)
    n = size.sum()
    pairs = np.asarray(n**2 - float(size @ size))
    fewer = pairs - 2 * size * (n - size)
    return Jackknife(_per_pair(total, pairs, n), _per_pair(total[..., None] - 2 * across, fewer, n))


def _per_pair(total: Array, pairs: Array, samples: float) -> Array:
    """Divide; a single group has no pairs, so its estimate is 0, which reads as hidden by noise."""
    there = np.broadcast_to(pairs > 1e-9 * samples**2, total.shape)  # 1e-9: rounding
    return np.divide(total, pairs, out=np.zeros(total.shape), where=there)


def chance(gram: Array, flips: int = 2000, seed: int = 0) -> float:
    """Return the p-value of a zero mean: how often noise alone would give as large a norm.

    A sign-flip test: if the mean is zero and the noise symmetric, every choice of signs is as
    likely as the observed one. Unlike a standard error, it allows for the heavy tails of gradients.

    Args:
        gram: `(groups, groups)`, inner products of the vectors.
        flips: random choices of signs.
        seed: of the choices.
    """
    across = np.array(gram, dtype=np.float64)
    np.fill_diagonal(across, 0.0)
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(flips, len(across)))
    signs[0] = 1.0  # the observed choice counts as well
    values = np.einsum("fg,fg->f", signs @ across, signs)
    return float((values >= across.sum() * (1 - 1e-12)).mean())


def groups_needed(level: float) -> int:
    """Return how many groups `chance` needs to be able to fall to (1 - level) / 2.

    The observed signs, and all of them flipped, give the same value: two of 2^groups choices.
    """
    return max(2, math.ceil(1 - math.log2((1 - level) / 2)))


def ratio_limits(above: Jackknife, below: Jackknife, quantile: float) -> tuple[Array, Array] | None:
    """Return Fieller's limits (1954) of above / below; None if `below` may be zero.

    They enclose the ratios r for which above - r below may be zero, by a jackknife over the groups.
    A standard error of the ratio would be too small if noise nearly hides `below`: `below` passes
    the test for noise only if luck made it large, and then the ratio is too small.

    Args:
        above: `(...)`.
        below: one estimate, from the same groups.
        quantile: of the errors, such as Student's.
    """
    groups = below.without_group.shape[-1]
    if groups < 3:  # without one of two groups there is no pair left
        return None
    a = above.without_group - above.without_group.mean(axis=-1, keepdims=True)
    b = below.without_group - below.without_group.mean()
    variance, factor = float(b @ b), quantile**2 * (groups - 1) / groups
    square = float(below.value) ** 2 - factor * variance
    if below.value <= 0.0 or square <= 0.0:
        return None
    centre = above.value * below.value - factor * (a @ b)
    spread = centre**2 - square * (above.value**2 - factor * (a**2).sum(axis=-1))
    root = np.sqrt(np.maximum(spread, 0.0))
    return (centre - root) / square, (centre + root) / square


def student_quantile(level: float, groups: int) -> float:
    """Return the quantile of Student's t with `groups - 1` degrees of freedom.

    Hill's expansion: within 1 % from four degrees of freedom on, up to level 0.99.
    """
    z, nu = NormalDist().inv_cdf(level), max(groups - 1, 1)
    return float(
        z
        + (z**3 + z) / (4 * nu)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * nu**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * nu**3)
    )
