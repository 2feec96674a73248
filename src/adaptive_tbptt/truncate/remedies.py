"""The assumption, watched: what is wrong with an estimate, where it comes from, what to do."""

from __future__ import annotations

import math

import numpy as np

from ..estimate.lag_profile import LagProfile
from ..estimate.truncation import Outcome, TruncationDecision

_REMEDIES = {
    Outcome.WINDOW_TOO_SHORT: "",  # the message itself says to measure a longer one
    Outcome.BEYOND_MAXIMUM: "raise k_max, or tolerate a larger delta",
    Outcome.NO_DECAY: (
        "MeasuredGauge counts only what reaches the parameters; weight decay and dropout make a "
        "state forget; a longer window shows whether it decays at all"
    ),
    Outcome.NO_BOUND: "measure a longer lags, or measure the bias itself with MeasuredGauge",
    Outcome.HELD_BACK: "",  # on purpose
    Outcome.UNRESOLVED: "give more rows, a larger budget of probes, or wait: evidence adds up",
}


def what_to_do(profile: LagProfile, decision: TruncationDecision) -> str | None:
    """Return the decision's message with cause and remedy; None where all is well.

    Args:
        profile: the newest one behind the decision.
        decision: what was decided.
    """
    slow = slow_part(profile, decision.beta)
    if decision.outcome not in _REMEDIES and slow is None:
        return None
    remedy = _REMEDIES.get(decision.outcome, "a longer window would see where it ends")
    return "; ".join(text for text in (decision.message, slow, remedy) if text)


def slow_part(profile: LagProfile, beta: float) -> str | None:
    """Say where the gradient survives, if it falls by less than a factor of e over the window."""
    if beta < math.exp(-1.0 / profile.lags) or not profile.last_squares:
        return None
    shares = {name: float(squares.sum()) for name, squares in profile.last_squares.items()}
    total = sum(shares.values())
    if not total > 0.0:
        return None
    name = max(shares, key=lambda part: shares[part])
    squares = np.sort(profile.last_squares[name])[::-1]
    few = int(np.searchsorted(np.cumsum(squares), 0.9 * squares.sum()) + 1)
    return (
        f"beta={beta:.4g} hardly decays over {profile.lags} lags: {shares[name] / total:.0%} of "
        f"the squared gradient left there is in {name}, nine tenths of that in {few} of its "
        f"{len(squares)} dimensions"
    )
