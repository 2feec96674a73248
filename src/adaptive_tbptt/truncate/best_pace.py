"""The context that gains most per step of work."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .. import defaults
from ..errors import require_whole
from ..estimate.pace import PaceLimits, choose_pace
from ..estimate.truncation import Outcome, TruncationDecision
from ..measure.sampling import Evidence, Request
from .controller import Context, Controller, TruncationState
from .gauges import MeasuredGauge, ProbeBudget

# Nothing is remembered: early in training the gradient turns within an estimate's interval, and
# old windows then hide the new gradient.
RECENT = ProbeBudget(segments=8, first=8, remembered=0)


@dataclass(frozen=True)
class BestPace(Controller):
    """The context k that gains most per step of work: the largest (1 - b_k) / (K2 + k).

    b_k is the measured relative bias with k steps of context, and K2 + k are the steps of a window
    with K2 losses. A step along a gradient with relative bias b gains, to first order, at least
    1 - b times what a step along the whole gradient gains (`estimate/pace.py`). More context
    removes bias, but fewer windows fit into the same time.

    A tolerance promises a bias, whatever that costs. This rule promises nothing: it leaves a bias
    of 20 % where removing it would double the cost. It is also short-sighted. A gradient that is
    small now but would grow if it were followed, as on the plateau of the copy task, does not
    count. `Unbiased(base=BestPace())` keeps such lags on average.

    If noise hides the gradient, k does not fall. It grows if the gradients of single windows, all
    rows together, miss so much that a longer context has clearly the better pace. At the first
    estimate k is then the longest measured context. If the training loss has stalled as well, k at
    least doubles.

    The bias is that of windows with `losses` losses, even if `losses_per_k` makes them carry more.

    Attributes:
        k_max: largest k to use.
        k_min: smallest k to use, and the k before the first estimate.
        gauge: how to measure the bias, and how many windows an estimate backpropagates.

    Choosing k_max: it bounds memory, and the lags that an estimate measures.
    """

    k_max: int = defaults.CONTEXT
    k_min: int = 0
    gauge: MeasuredGauge = field(default_factory=lambda: MeasuredGauge(RECENT))

    def __post_init__(self) -> None:
        require_whole(k_min=self.k_min, k_max=self.k_max)
        if not 0 <= self.k_min <= self.k_max or self.k_max < 2:
            raise ValueError(
                "k_min must be in [0, k_max], and k_max at least 2 to see a decay; got "
                f"k_min={self.k_min} and k_max={self.k_max}"
            )

    def request(self, state: TruncationState, losses: int | None) -> Request:
        """Request the gradient by level up to k_max."""
        remembered = 0 if state.evidence is None else state.evidence.groups
        return self.gauge.request(self.k_max, (self.k_min, self.k_max), losses, remembered)

    def init(self) -> TruncationState:
        """Start with k_min: a readout that starts at zero shows no gradient before some updates."""
        return TruncationState(self.k_min)

    def update(self, state: TruncationState, evidence: Evidence) -> TruncationState:
        """Measure the bias, then choose k."""
        remembered = self.gauge.gather(state.evidence, evidence)
        curve = self.gauge.bias(remembered)
        now = None if state.decision is None else state.known_k
        limits = PaceLimits(self.k_min, self.k_max, now, bool(state.stalled))
        decision = choose_pace(curve, limits)
        kept = remembered if self.gauge.budget.remembered else None
        return TruncationState(decision.k, decision, evidence=kept, curve=curve)

    def brief(self, state: TruncationState, evidence: Evidence) -> dict[str, Any]:
        """Keep all measurements behind the estimate, remembered ones included."""
        return self.gauge.brief(evidence if state.evidence is None else state.evidence)

    def context(self, state: TruncationState, losses: int, step: int) -> Context:
        """Return k: every window has the same until the next estimate."""
        return Context(state.known_k)

    def assess(self, state: TruncationState, k: int) -> TruncationDecision | None:
        """Return the bias at k, with what was chosen instead."""
        chosen, curve = state.decision, state.curve
        if chosen is None or curve is None or chosen.k == k:
            return chosen
        bias = curve.relative_at(k)
        message = f"k is held at {k}, where the bias is {bias:.3g}; {chosen.message}"
        return replace(chosen, k=k, relative_bias=bias, outcome=Outcome.HELD_BACK, message=message)
