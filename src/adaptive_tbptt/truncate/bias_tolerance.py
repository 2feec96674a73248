"""TODO."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..estimate.contributions import GROUPS, Contributions
from ..estimate.lag_profile import Array, LagProfile
from ..estimate.truncation import Outcome, TruncationDecision, check_tolerance, choose_truncation
from .controller import Controller, TruncationState
from .gauges import Gauge, PaperGauge


@dataclass(frozen=True)
class BiasTolerance(Controller):
    """The smallest k whose estimated relative bias is below delta (Algorithm 1, lines 3 to 7).

    Attributes:
        delta: tolerated relative bias of the gradient, in (0, 1).
        k_min: smallest k to use.
        k_max: largest k to use, also where delta cannot be met.
        lags: lags to measure; should be at least k_max.
        k_init: k until the first scheduled estimate (K_0); None estimates before the first window.
        gauge: how the relative bias is read off a profile.

    Choosing k_max: it bounds memory and the cost of the worst case. Choosing the window: see
    `probe`. Choosing delta: see `choose_truncation`.
    """

    delta: float
    k_min: int = 1
    k_max: int = 100
    lags: int = 100
    k_init: int | None = None
    gauge: Gauge = field(default_factory=PaperGauge)

    def __post_init__(self) -> None:
        check_tolerance(self.delta, self.k_min, self.k_max)
        if self.lags < 2:
            raise ValueError(f"lags must be at least 2 lags to see a decay, got {self.lags}")
        if self.k_init is not None and not self.k_min <= self.k_init <= self.k_max:
            raise ValueError(
                f"k_init must be in [k_min, k_max] = [{self.k_min}, {self.k_max}], "
                f"got {self.k_init}"
            )

    @property
    def sketch(self) -> int:
        """What the gauge wants."""
        return self.gauge.sketch

    def init(self) -> TruncationState:
        """Start with k_init."""
        return TruncationState(self.k_init)

    def update(self, control: TruncationState, profile: LagProfile) -> TruncationState:
        """Fit, bound, choose; ask for more while noise hides the answer and the budget lasts."""
        probes, probed, evidence = self.gauge.probes, control.probed + 1, control.evidence
        if profile.contributions is not None:
            evidence = (*evidence, profile.contributions)[-probes.remembered - probed :]
            # An answer that a few probes seem to give is not trusted: one looks until it comes.
            if probed < probes.budget and (probed % probes.fresh or len(evidence) < probes.budget):
                return TruncationState(
                    control.k, control.decision, evidence=evidence, probed=probed
                )
            profile = _with(profile, evidence)
        curve = self.gauge.bias(profile)
        decision = choose_truncation(
            curve,
            delta=self.delta,
            k_min=self.k_min,
            k_max=self.k_max,
            k_now=control.k,
        )
        if decision.outcome is Outcome.UNRESOLVED and probed < probes.budget:
            return TruncationState(control.k, decision, evidence=evidence, probed=probed)
        if len(evidence) >= GROUPS:  # enough groups without those inside a probe
            evidence = tuple(e.merged() for e in evidence)
        return TruncationState(decision.k, decision, evidence=evidence, curve=curve)

    def norms(self, control: TruncationState, profile: LagProfile) -> Array:
        """What the gauge looked at: where it remembers probes, all of them."""
        return self.gauge.norms(_with(profile, control.evidence))

    def assess(self, control: TruncationState, k: int) -> TruncationDecision | None:
        """Tell the bias at k."""
        if control.curve is None:
            return None
        chosen = control.decision
        found = choose_truncation(control.curve, delta=self.delta, k_min=k, k_max=k)
        if found.outcome.met or chosen is None:
            return found
        held = f"k is held at {k}, where the bound is {found.relative_bias:.3g}"
        if chosen.outcome.met:
            message = f"{held}; {chosen.k} was chosen for delta={self.delta:g}"
            return replace(found, outcome=Outcome.HELD_BACK, message=message)
        return replace(found, outcome=chosen.outcome, message=f"{chosen.message}; {held}")


def _with(profile: LagProfile, evidence: tuple[Contributions, ...]) -> LagProfile:
    """Return a profile that holds the contributions of several probes, if there are any."""
    if not evidence:
        return profile
    return replace(profile, contributions=Contributions.concatenate(evidence))
