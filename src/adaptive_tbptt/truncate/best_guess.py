"""The context that meets a tolerance by the best guess."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .. import defaults
from ..errors import require_whole
from ..estimate.guess import guess
from ..estimate.truncation import Limits, Outcome, TruncationDecision
from ..measure.sampling import Evidence, Request
from .controller import Context, Controller, TruncationState
from .gauges import MeasuredGauge, ProbeBudget

# Nothing is remembered: early in training the gradient turns within an estimate's interval, and
# old windows then hide the new gradient.
RECENT = ProbeBudget(segments=8, first=8, remembered=0)

# Arbitrary. Every level of an estimate is a call of the model, which costs as much as several
# steps: shorter levels do not pay.
SHORTEST = 8


@dataclass(frozen=True)
class BestGuess(Controller):
    """The smallest context whose estimated relative bias is at most delta.

    `BiasTolerance` chooses a context whose bias is below delta with confidence. It measures many
    losses for that, and its context is often longer than needed. A guess needs few losses. It may
    miss delta, but the next estimate corrects it. It promises nothing, and costs little.

    If noise hides the gradient, k does not fall. It grows if the gradients of single windows, all
    rows together, miss more than delta. Lags that noise hides need something else: long windows
    once the training loss has stalled (`AdaptiveTBPTT(long_windows=160)`, as by default), or random
    contexts (`Unbiased(base=BestGuess())`).

    The bias is that of windows with `losses` losses, even if `losses_per_k` makes them carry more.

    Attributes:
        delta: relative bias to aim at.
        k_max: largest k to use.
        k_min: smallest k to use, and the k before the first estimate.
        gauge: how to measure the bias, and how many windows an estimate backpropagates.

    Choosing delta: with 0.3 in place of 0.2 our pilots came out alike. Choosing k_max: it bounds
    memory, and the lags that an estimate measures.
    """

    delta: float = defaults.GUESS_DELTA
    k_max: int = defaults.GUESS_K_MAX
    k_min: int = 0
    gauge: MeasuredGauge = field(default_factory=lambda: MeasuredGauge(RECENT))

    def __post_init__(self) -> None:
        require_whole(k_min=self.k_min, k_max=self.k_max)
        if not 0.0 < self.delta < 1.0:
            raise ValueError(
                f"delta must be in (0, 1), got {self.delta}: it is the relative bias of the "
                "gradient to aim at, 0.1 means 10 %"
            )
        if not 0 <= self.k_min <= self.k_max or self.k_max < 2:
            raise ValueError(
                "k_min must be in [0, k_max], and k_max at least 2 to see a decay; got "
                f"k_min={self.k_min} and k_max={self.k_max}"
            )

    def request(self, state: TruncationState, losses: int | None) -> Request:
        """Request the gradient by level up to k_max."""
        remembered = 0 if state.evidence is None else state.evidence.groups
        ends = self.k_min, self.k_max
        request = self.gauge.request(self.k_max, ends, losses, remembered)
        if self.k_max < 4 * SHORTEST:
            return request
        kept = (c for c in request.contexts if c == 0 or c >= SHORTEST or c in ends)
        return replace(request, contexts=tuple(kept))

    def init(self) -> TruncationState:
        """Start with k_min: a readout that starts at zero shows no gradient before some updates."""
        return TruncationState(self.k_min)

    def update(self, state: TruncationState, evidence: Evidence) -> TruncationState:
        """Measure the bias, then choose k."""
        remembered = self.gauge.gather(state.evidence, evidence)
        curve = self.gauge.bias(remembered)
        decision = guess(curve, Limits(self.delta, self.k_min, self.k_max, state.known_k))
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
