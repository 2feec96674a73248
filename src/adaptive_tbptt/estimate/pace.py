"""What a context gains per step of work.

Let g be the gradient with all lags and g_K the one with K steps of context, b_K = |g - g_K| / |g|.
Then <g, g_K> >= (1 - b_K) |g|^2: to first order, a step along g_K gains at least the share 1 - b_K
of what a step along g gains. A window of K2 losses and K steps of context costs K2 + K steps:

    pace(K) = (1 - b_K) K2 / (K2 + K)

is 1 for a window without bias and context.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .level_bias import LevelCurve
from .truncation import Outcome, TruncationDecision

CLEARLY = 1.1  # arbitrary: how much better another context must be, so that noise does not move k


def paces(curve: LevelCurve) -> NDArray[np.float64]:
    """Return the pace of every context."""
    gained = 1.0 - np.clip(curve.estimate, 0.0, 1.0)
    return gained * curve.losses / (curve.losses + np.array(curve.contexts, float))


def choose_pace(curve: LevelCurve, k_min: int, k_max: int, k_now: int) -> TruncationDecision:
    """Return the context with the best pace.

    Args:
        curve: the measured bias.
        k_min: smallest k to choose.
        k_max: largest k to choose.
        k_now: the k in use. It stays if noise hides the gradient, or if no other is clearly better.
    """
    k, outcome = k_now, Outcome.KEPT
    if not curve.hidden:
        found, outcome = paces(curve), Outcome.BEST_PACE
        inside = [j for j, c in enumerate(curve.contexts) if k_min <= c <= k_max]
        best = max(inside, key=lambda j: found[j])
        now = curve.at(k_now)
        k = k_now if found[best] <= CLEARLY * found[now] else curve.contexts[best]
        message = (
            f"k={k} gains most per step: bias {curve.relative_at(k):.3g}, and "
            f"{found[curve.at(k)]:.0%} of the pace without bias and context"
        )
    else:
        message = f"noise hides the gradient of {curve.samples} losses; using k={k}"
    return TruncationDecision(
        k=k,
        relative_bias=curve.relative_at(k),
        outcome=outcome,
        message=message,
        delta=None,
        beta=curve.beta,
        tau=curve.tau,
    )
