"""||E v||^2 from noisy samples of v: the norm of a mean is biased upwards, this is not.

The square of a sum of independent vectors, less their own squares, holds only products of
different ones, whose mean is ||E v||^2: a U-statistic. What the jackknife needs falls out on the
way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


BLOCKS = 16  # of the coordinates, to see how much a sketch of another seed would differ


@dataclass(frozen=True)
class SquaredMeans:
    """Estimates of ||E v||^2, up to the same factor for all.

    Attributes:
        value: `(...)`.
        without_group: `(..., groups)`, with one group of samples left out.
        without_block: `(..., blocks)`, with one block of coordinates left out.
        pairs: what `value` is to be divided by.
    """

    value: Array
    without_group: Array
    without_block: Array
    pairs: float


def squared_means(
    vectors: NDArray[np.floating], sizes: NDArray[np.int64], blocks: int = BLOCKS
) -> SquaredMeans:
    """Estimate ||E v||^2 from sums over independent groups of samples.

    Args:
        vectors: `(..., groups, m)`.
        sizes: `(groups,)`, samples in each.
        blocks: that m is split into; 1 where the vectors are no sketches.
    """
    v = np.asarray(vectors)
    blocks = min(blocks, v.shape[-1])
    own, along = np.zeros((*v.shape[:-1], blocks)), np.zeros((*v.shape[:-1], blocks))
    for i, part in enumerate(np.array_split(v, blocks, axis=-1)):
        total = part.sum(axis=-2, dtype=np.float64).astype(v.dtype)
        own[..., i] = np.einsum("...gm,...gm->...g", part, part)
        along[..., i] = np.einsum("...gm,...m->...g", part, total)
    by_block = (along - own).sum(axis=-2)
    value = by_block.sum(axis=-1)
    n = float(sizes.sum())
    # One group alone has no pairs: its estimate is 0, which is what hidden by noise looks like.
    pairs = max(n**2 - float((sizes.astype(float) ** 2).sum()), 1.0)
    fewer = np.maximum(pairs - 2 * sizes * (n - sizes), 1.0)
    without_group = (value[..., None] - 2 * (along - own).sum(axis=-1)) * (pairs / fewer)
    without_block = (value[..., None] - by_block) * (blocks / max(blocks - 1, 1))
    return SquaredMeans(value, without_group, without_block, pairs)


def chance(vectors: NDArray[np.floating], flips: int = 2000, seed: int = 0) -> float:
    """Return how often vectors without a mean would look as much like having one as these do.

    If the mean were zero, and the noise as likely to point one way as the other, every choice of
    signs would be as good as the one that was drawn. Gradients have heavy tails, to which this is
    indifferent; a standard error is not.

    Args:
        vectors: `(groups, m)`.
        flips: random choices of signs.
        seed: of the choices.
    """
    v = np.asarray(vectors, dtype=np.float64)
    gram = v @ v.T
    np.fill_diagonal(gram, 0.0)
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(flips, len(v)))
    signs[0] = 1.0  # the choice that was drawn counts as well
    values = np.einsum("fg,fg->f", signs @ gram, signs)
    return float((values >= gram.sum() * (1 - 1e-12)).mean())


def groups_needed(level: float) -> int:
    """Return how many groups it takes for `chance` to fall to what `level` leaves on one side.

    All signs as they were drawn, or all turned, look the same: two choices of 2^groups.
    """
    return max(2, math.ceil(1 - math.log2((1 - level) / 2)))


def spread(*leave_one_out: Array) -> Array:
    """Return the jackknife standard error, independent causes added up."""
    total = 0.0
    for values in leave_one_out:
        n = values.shape[-1]
        total = total + (n - 1) * values.var(axis=-1)
    return np.sqrt(total)


def quantile(level: float, groups: int) -> float:
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
