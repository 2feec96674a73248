"""What to do about an estimate that is not what was asked for."""

from __future__ import annotations

from ..estimate.truncation import Outcome, TruncationDecision
from ..measure.sampling import Evidence

_REMEDIES = {
    Outcome.WINDOW_TOO_SHORT: "",  # the message itself says to measure more lags
    Outcome.BEYOND_MAXIMUM: "raise k_max, or tolerate a larger delta",
    Outcome.NO_DECAY: (
        "MeasuredGauge counts only what reaches the parameters; weight decay and dropout make a "
        "state forget; more lags show whether it decays at all"
    ),
    Outcome.NO_BOUND: "measure more lags, or measure the bias itself with MeasuredGauge",
    Outcome.HELD_BACK: "",  # on purpose
    Outcome.UNRESOLVED: "give more rows, a larger ProbeBudget, or wait: evidence adds up",
}


def what_to_do(evidence: Evidence, decision: TruncationDecision) -> str | None:
    """Return the decision's message with cause and remedy; None where all is well.

    Args:
        evidence: the newest measurement behind the decision.
        decision: what was decided.
    """
    slow = evidence.slow_part(decision.beta)
    if decision.outcome not in _REMEDIES and slow is None:
        return None
    remedy = _REMEDIES.get(decision.outcome, "more lags would show where it ends")
    return "; ".join(text for text in (decision.message, slow, remedy) if text)
