"""The smallest truncation length whose relative bias is tolerated: Algorithm 1, lines 3 to 7."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .. import defaults
from ..errors import require_whole
from ..estimate.truncation import Limits, Outcome, TruncationDecision, choose_truncation
from ..measure.sampling import Evidence, Request
from .controller import Context, Controller, TruncationState
from .gauges import Gauge, MeasuredGauge


@dataclass(frozen=True)
class BiasTolerance(Controller):
    """The smallest k whose relative bias is below delta (Algorithm 1, lines 3 to 7).

    Attributes:
        delta: tolerated relative bias of the gradient, in (0, 1).
        k_min: smallest k to use.
        k_max: largest k to use, even if delta cannot be met.
        lags: how far back to measure; should be at least k_max.
        k_init: k until the first scheduled estimate (K_0); None estimates before the first window.
        gauge: how to estimate the relative bias: `MeasuredGauge`, or one of the paper's.

    With the measured gauge k is one of the levels 0, 1, 2, 4, ..., k_min and k_max. `k_min=0` lets
    it choose the plain detach loop; `AdaptiveTBPTT(losses=...)` then sets the length of a window.

    Choosing k_max: it bounds memory and the cost of the worst case. Choosing lags: the bias beyond
    them is extrapolated, so take at least k_max. Choosing delta: see `choose_truncation`.
    """

    delta: float
    k_min: int = defaults.K_MIN
    k_max: int = defaults.K_MAX
    lags: int = defaults.PROBE_LAGS
    k_init: int | None = None
    gauge: Gauge = field(default_factory=MeasuredGauge)

    def __post_init__(self) -> None:
        require_whole(lags=self.lags, k_init=self.k_init)
        Limits(self.delta, self.k_min, self.k_max)
        if self.lags < 2:
            raise ValueError(f"lags must be at least 2 to see a decay, got {self.lags}")
        if self.k_init is not None and not self.k_min <= self.k_init <= self.k_max:
            raise ValueError(
                f"k_init must be in [k_min, k_max] = [{self.k_min}, {self.k_max}], "
                f"got {self.k_init}"
            )

    def request(self, state: TruncationState, losses: int | None) -> Request:
        """Return what the gauge needs."""
        remembered = 0 if state.evidence is None else state.evidence.groups
        return self.gauge.request(self.lags, (self.k_min, self.k_max), losses, remembered)

    def init(self) -> TruncationState:
        """Start with k_init."""
        return TruncationState(self.k_init)

    def update(self, state: TruncationState, evidence: Evidence) -> TruncationState:
        """Estimate the bias, then choose k."""
        remembered = self.gauge.gather(state.evidence, evidence)
        curve = self.gauge.bias(evidence if remembered is None else remembered)
        decision = choose_truncation(
            curve, delta=self.delta, k_min=self.k_min, k_max=self.k_max, k_now=state.k
        )
        return TruncationState(decision.k, decision, evidence=remembered, curve=curve)

    def brief(self, state: TruncationState, evidence: Evidence) -> dict[str, Any]:
        """Keep all measurements behind the estimate, remembered ones included."""
        return self.gauge.brief(evidence if state.evidence is None else state.evidence)

    def context(self, state: TruncationState, losses: int, step: int) -> Context:
        """Return k: every window has the same until the next estimate."""
        return Context(state.known_k)

    def assess(self, state: TruncationState, k: int) -> TruncationDecision | None:
        """Return the bias at k, with what was chosen instead."""
        if state.curve is None:
            return None
        chosen = state.decision
        found = choose_truncation(state.curve, delta=self.delta, k_min=k, k_max=k)
        if found.outcome.met or chosen is None:
            return found
        held = f"k is held at {k}, where the bias is {found.relative_bias:.3g}"
        if chosen.outcome.met:
            message = f"{held}; {chosen.k} was chosen for delta={self.delta:g}"
            return replace(found, outcome=Outcome.HELD_BACK, message=message)
        return replace(found, outcome=chosen.outcome, message=f"{chosen.message}; {held}")
