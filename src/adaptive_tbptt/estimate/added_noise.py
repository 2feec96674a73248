"""How much noise a randomly drawn, weighted context adds to the gradient.

Level j runs with probability P_j, never without the levels before it, and has the weight 1 / P_j.
With T_j the sum of the levels from j on, the gradient g that is drawn has

    E|g|^2 = sum_j V_j / P_j,   V_j = E|T_j|^2 - E|T_{j+1}|^2

The sum of V_j alone is the same for the whole gradient, which is drawn with all P_j = 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .level_sums import LevelSums


def added_noise(sums: LevelSums, levels: Sequence[tuple[int, float]]) -> float:
    """Return by what share random levels increase the mean squared norm of a window's gradient.

    Args:
        sums: gradients by level. Each group should hold a single window, since noise averages out
            within a group.
        levels: pairs (context, probability), ascending, as `Unbiased.levels` returns them. A
            context that was not measured counts as the longest measured one below it.
    """
    windows = sums.vectors.astype(np.float64) / sums.counts[:, None, None]
    tails = np.flip(np.flip(windows, 1).cumsum(1), 1)
    squares = [*(tails**2).sum(2).mean(0), 0.0]

    def beyond(context: int) -> float:
        return float(squares[np.searchsorted(sums.contexts, context, side="right")])

    added, before = 0.0, 0
    for context, chance in levels:
        added += (beyond(before) - beyond(context)) * (1.0 / chance - 1.0)
        before = context
    return added / float(squares[0])
