"""What to do about an estimate that does not meet the tolerance."""

from __future__ import annotations

from ..estimate.truncation import Outcome, TruncationDecision
from ..measure.sampling import Evidence

_REMEDIES = {
    Outcome.WINDOW_TOO_SHORT: "",  # the message itself says to measure more lags
    Outcome.BEYOND_MAXIMUM: "raise k_max, or tolerate a larger delta",
    Outcome.NO_DECAY: (
        "use MeasuredGauge, which counts only what reaches the parameters; measure more lags to "
        "see whether the gradient decays at all; weight decay and dropout make a state forget"
    ),
    Outcome.NO_BOUND: "measure more lags, or measure the bias itself with MeasuredGauge",
    Outcome.HELD_BACK: "",  # the user's wrapper does this on purpose
    Outcome.UNRESOLVED: "use more rows or a larger ProbeBudget; later estimates also add evidence",
}


def what_to_do(evidence: Evidence, decision: TruncationDecision) -> str | None:
    """Return the decision's message with cause and remedy; None if all is well.

    Args:
        evidence: the newest measurement behind the decision.
        decision: the decision.
    """
    slow = evidence.slow_part(decision.beta)
    if decision.outcome not in _REMEDIES and slow is None:
        return None
    remedy = _REMEDIES.get(decision.outcome, "more lags would show where it ends")
    return "; ".join(text for text in (decision.message, slow, remedy) if text)
