"""||E v||^2 from noisy samples of v: the norm of a mean is biased upwards, this estimate is not.

The square of a sum of independent vectors, less their own squares, holds only products of
different ones, whose mean is ||E v||^2: a U-statistic. Everything here works on the Gram matrix of
the vectors, so it does not matter how long they are.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class SquaredMeans(NamedTuple):
    """Estimates of ||E v||^2 `(...)`, and those without each group `(..., groups)`: a jackknife."""

    value: Array
    without_group: Array


def squared_means(gram: Array, sizes: Array) -> SquaredMeans:
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
    return SquaredMeans(
        _per_pair(total, pairs, n), _per_pair(total[..., None] - 2 * across, fewer, n)
    )


def _per_pair(total: Array, pairs: Array, samples: float) -> Array:
    """Divide; one group alone has no pairs: its estimate is 0, which reads as hidden by noise."""
    there = np.broadcast_to(pairs > 1e-9 * samples**2, total.shape)  # 1e-9: rounding
    return np.divide(total, pairs, out=np.zeros(total.shape), where=there)


def chance(gram: Array, flips: int = 2000, seed: int = 0) -> float:
    """Return how often vectors without a mean would look as much like having one as these do.

    A sign-flip test: if the mean is zero and the noise symmetric, every choice of signs is as
    likely as the one that was drawn. Unlike a standard error it allows heavy tails, which gradients
    have.

    Args:
        gram: `(groups, groups)`, inner products of the vectors.
        flips: random choices of signs.
        seed: of the choices.
    """
    across = np.array(gram, dtype=np.float64)
    np.fill_diagonal(across, 0.0)
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(flips, len(across)))
    signs[0] = 1.0  # the choice that was drawn counts as well
    values = np.einsum("fg,fg->f", signs @ across, signs)
    return float((values >= across.sum() * (1 - 1e-12)).mean())


def groups_needed(level: float) -> int:
    """Return how many groups it takes for `chance` to fall to what `level` leaves on one side.

    All signs as they were drawn, or all turned, look the same: two choices of 2^groups.
    """
    return max(2, math.ceil(1 - math.log2((1 - level) / 2)))


def ratio_limits(
    above: SquaredMeans, below: SquaredMeans, quantile: float
) -> tuple[Array, Array] | None:
    """Return Fieller's limits (1954) of above / below; None where `below` may be zero.

    They are the ratios r for which above - r below may be zero, by a jackknife over the groups. An
    error of the ratio itself would be too small where noise nearly hides `below`: it is told from
    noise only if luck made it large, and the ratio is too small then.

    Args:
        above: `(...)`.
        below: one estimate, from the same groups.
        quantile: of the errors, such as Student's.
    """
    groups = below.without_group.shape[-1]
    if groups < 3:  # one of two left out leaves no pair
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

    Hill's expansion: from four degrees of freedom on right to a per cent, up to level 0.99.
    """
    z, nu = NormalDist().inv_cdf(level), max(groups - 1, 1)
    return float(
        z
        + (z**3 + z) / (4 * nu)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * nu**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * nu**3)
    )
