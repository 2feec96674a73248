"""What a context gains per step of work.

Let g be the gradient with all lags and g_K the one with K steps of context, b_K = |g - g_K| / |g|.
Then <g, g_K> >= (1 - b_K) |g|^2: to first order, a step along g_K gains at least the share 1 - b_K
of what a step along g gains. A window of K2 losses and K steps of context costs K2 + K steps:

    pace(K) = (1 - b_K) K2 / (K2 + K)

is 1 for a window without bias and context. All contexts are compared at the same K2, the one that
the bias was measured with, even if the loop then carries more losses with a longer context.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .level_bias import LevelCurve
from .truncation import Outcome, TruncationDecision

CLEARLY = 1.1  # arbitrary: how much better another context must be, so that noise does not move k


def paces(curve: LevelCurve) -> NDArray[np.float64]:
    """Return the pace of every context.

    If noise hides the mean gradient, what single groups of windows miss stands in for its bias.
    """
    gained = 1.0 - np.clip(curve.single if curve.hidden else curve.estimate, 0.0, 1.0)
    return gained * curve.losses / (curve.losses + np.array(curve.contexts, float))


@dataclass(frozen=True)
class PaceLimits:
    """The constraints on a choice of k.

    Attributes:
        k_min: smallest k to choose.
        k_max: largest k to choose.
        k_now: the k in use; None before the first choice.
        stalled: whether the training loss has stopped falling.
    """

    k_min: int
    k_max: int
    k_now: int | None = None
    stalled: bool = False


def choose_pace(curve: LevelCurve, limits: PaceLimits) -> TruncationDecision:
    """Return the context with the best pace; the k in use stays if no other is clearly better.

    If noise hides the gradient, k does not fall: a shorter context may lose what noise hides. It
    grows if single groups miss so much that a longer context has clearly the better pace. If
    nothing was measured before, k is the longest measured context. If the loss has stalled, k at
    least doubles, since nothing is gained at the present k.
    """
    inside = [c for c in curve.contexts if limits.k_min <= c <= limits.k_max]
    found = dict(zip(curve.contexts, paces(curve), strict=True))
    k = max(inside, key=lambda c: found[c])
    # A short stream is measured less far than the k that another one gave.
    now = None if limits.k_now is None else curve.contexts[curve.at(limits.k_now)]
    if now is not None and found[k] <= CLEARLY * found[now]:
        k = now
    if curve.hidden:
        longest = inside[-1]
        k = longest if limits.k_now is None else max(k, limits.k_now)
        if limits.stalled:
            k = max(k, next((c for c in inside if c >= max(2 * k, curve.losses)), longest))
        outcome = Outcome.KEPT
        message = f"noise hides the gradient of {curve.samples} losses; using k={k}"
    else:
        outcome = Outcome.BEST_PACE
        message = (
            f"k={k} has the best pace, or one close to it: its bias is "
            f"{curve.relative_at(k):.3g}, and a step of work gains {found[k]:.0%} of what it would "
            "without bias and context"
        )
    return TruncationDecision(
        k=k,
        relative_bias=curve.relative_at(k),
        outcome=outcome,
        message=message,
        delta=None,
        beta=curve.beta,
        tau=curve.tau,
    )
