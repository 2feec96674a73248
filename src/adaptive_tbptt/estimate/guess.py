"""The context that meets a tolerance by the best guess: by the estimate, not by its upper limit."""

from __future__ import annotations

import numpy as np

from .level_bias import LevelCurve
from .truncation import Limits, Outcome, TruncationDecision


def guess(curve: LevelCurve, limits: Limits) -> TruncationDecision:
    """Return the smallest context from which on the estimated bias is at most delta.

    The longest context that was measured is the reference: what lies beyond it counts for nothing.
    If noise hides the mean gradient, what single groups of windows miss stands in for its bias. k
    may then grow, but it does not fall: a shorter context may lose what noise hides.

    Args:
        curve: the measured bias.
        limits: delta and the range of k; k_now is the k in use.
    """
    found = curve.single if curve.hidden else curve.estimate
    # The bias need not fall monotonically: a context counts only if all longer ones do.
    worst = np.maximum.accumulate(found[::-1])[::-1]
    inside = [c for c in curve.contexts if limits.k_min <= c <= limits.k_max]
    k = next((c for c in inside if worst[curve.at(c)] <= limits.delta), inside[-1])
    if curve.hidden:
        k, outcome = max(k, limits.k_now or 0), Outcome.HIDDEN
        message = f"noise hides the gradient of {curve.samples} losses; using k={k}"
    else:
        outcome = Outcome.BEST_GUESS
        message = (
            f"k={k}: with {k} steps of context the bias is about {curve.relative_at(k):.3g}, "
            f"against {curve.contexts[-1]} steps"
        )
    return TruncationDecision(
        k=k,
        relative_bias=curve.relative_at(k),
        outcome=outcome,
        message=message,
        delta=limits.delta,
        beta=curve.beta,
        tau=curve.tau,
    )
