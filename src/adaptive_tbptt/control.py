"""Controllers: from one lag profile to the next truncation length. They never see the model.

A controller is a frozen value; what it remembers goes in and comes out as a `Control`, so it can be
logged, saved, resumed and tested without a model. Wrappers that modify another controller are in
`wrappers.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .bias import BiasCurve
from .contributions import GROUPS, Contributions
from .gauge import Gauge, PaperGauge
from .profile import Array, LagProfile
from .truncation import Outcome, TruncationDecision, check_tolerance, choose_truncation


@dataclass(frozen=True)
class Control:
    """What a controller has decided and remembers.

    Attributes:
        k: truncation length to use now; None asks for an estimate before the first window.
        decision: the estimate behind it, if there was one.
        memory: numbers a wrapper carries from one estimate to the next.
        inner: the same of the controller it wraps.
        evidence: contributions of recent probes, the newest last.
        probed: probes spent on an estimate that is under way; 0 when it is done.
        curve: the bias that the decision was read off; not saved.
    """

    k: int | None
    decision: TruncationDecision | None = None
    memory: tuple[float, ...] = ()
    inner: Control | None = None
    evidence: tuple[Contributions, ...] = field(default=(), repr=False)
    probed: int = 0
    curve: BiasCurve | None = field(default=None, repr=False, compare=False)

    @property
    def wants_more(self) -> bool:
        """Whether another probe is asked for before k is decided."""
        return self.probed > 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values and tensors, for a checkpoint."""
        decision = None
        if self.decision is not None:
            decision = {**asdict(self.decision), "outcome": self.decision.outcome.name}
        return {
            "k": self.k,
            "decision": decision,
            "memory": list(self.memory),
            "inner": None if self.inner is None else self.inner.to_dict(),
            "evidence": [c.to_dict() for c in self.evidence],
            "probed": self.probed,
        }

    @staticmethod
    def from_dict(saved: dict[str, Any]) -> Control:
        """Undo `to_dict`."""
        decision = saved["decision"]
        if decision is not None:
            decision = TruncationDecision(**{**decision, "outcome": Outcome[decision["outcome"]]})
        inner = None if saved["inner"] is None else Control.from_dict(saved["inner"])
        evidence = tuple(Contributions.from_dict(c) for c in saved.get("evidence", ()))
        return Control(
            saved["k"], decision, tuple(saved["memory"]), inner, evidence, saved.get("probed", 0)
        )


class Controller(ABC):
    """Chooses the truncation length. Classes below it are final."""

    def __repr__(self) -> str:
        # A checkpoint compares it; the default would hold an address in memory.
        return f"{type(self).__name__}()"

    @property
    @abstractmethod
    def window(self) -> int:
        """Lags it wants measured at each estimate; 0 means it never asks for one."""

    @property
    @abstractmethod
    def k_max(self) -> int:
        """The largest k it may choose; the past that must be kept at hand."""

    @property
    def sketch(self) -> int:
        """Size of the sketches it wants, as in `probe`; 0 where the state alone will do."""
        return 0

    @abstractmethod
    def init(self) -> Control:
        """Return what holds before the first estimate."""

    @abstractmethod
    def update(self, control: Control, profile: LagProfile) -> Control:
        """Return what holds after a probe; it may ask for another one with `wants_more`."""

    def norms(self, control: Control, profile: LagProfile) -> Array:
        """`(lags, samples)`: the norms behind its last estimate, whose newest probe is given."""
        return profile.measured

    @abstractmethod
    def assess(self, control: Control, k: int) -> TruncationDecision | None:
        """Say what its last estimate means for a k that something else chose; None if nothing."""


@dataclass(frozen=True)
class FixedTruncation(Controller):
    """Always the same k: ordinary truncated backpropagation. k = T is full backpropagation.

    Attributes:
        k: truncation length; the gradient keeps lags 0..k.
    """

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {self.k}: it counts steps back in time")

    @property
    def window(self) -> int:
        """Nothing is measured."""
        return 0

    @property
    def k_max(self) -> int:
        """The one k there is."""
        return self.k

    def init(self) -> Control:
        """Start with k."""
        return Control(self.k)

    def update(self, control: Control, profile: LagProfile) -> Control:
        """Stay."""
        return control

    def assess(self, control: Control, k: int) -> None:
        """No tolerance was asked for."""
        return None


@dataclass(frozen=True)
class BiasTolerance(Controller):
    """The smallest k whose estimated relative bias is below delta (Algorithm 1, lines 3 to 7).

    Attributes:
        delta: tolerated relative bias of the gradient, in (0, 1).
        k_min: smallest k to use.
        k_max: largest k to use, also where delta cannot be met.
        window: lags to measure; should be at least k_max.
        k_init: k until the first scheduled estimate (K_0); None estimates before the first window.
        gauge: how the relative bias is read off a profile.

    Choosing k_max: it bounds memory and the cost of the worst case. Choosing the window: see
    `probe`. Choosing delta: see `choose_truncation`.
    """

    delta: float
    k_min: int = 1
    k_max: int = 100
    window: int = 100
    k_init: int | None = None
    gauge: Gauge = field(default_factory=PaperGauge)

    def __post_init__(self) -> None:
        check_tolerance(self.delta, self.k_min, self.k_max)
        if self.window < 2:
            raise ValueError(f"window must be at least 2 lags to see a decay, got {self.window}")
        if self.k_init is not None and not self.k_min <= self.k_init <= self.k_max:
            raise ValueError(
                f"k_init must be in [k_min, k_max] = [{self.k_min}, {self.k_max}], "
                f"got {self.k_init}"
            )

    @property
    def sketch(self) -> int:
        """What the gauge wants."""
        return self.gauge.sketch

    def init(self) -> Control:
        """Start with k_init."""
        return Control(self.k_init)

    def update(self, control: Control, profile: LagProfile) -> Control:
        """Fit, bound, choose; ask for more while noise hides the answer and the budget lasts."""
        probes, probed, evidence = self.gauge.probes, control.probed + 1, control.evidence
        if profile.contributions is not None:
            evidence = (*evidence, profile.contributions)[-probes.remembered - probed :]
            # An answer that a few probes seem to give is not trusted: one looks until it comes.
            if probed < probes.budget and (probed % probes.fresh or len(evidence) < probes.budget):
                return Control(control.k, control.decision, evidence=evidence, probed=probed)
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
            return Control(control.k, decision, evidence=evidence, probed=probed)
        if len(evidence) >= GROUPS:  # enough groups without those inside a probe
            evidence = tuple(e.merged() for e in evidence)
        return Control(decision.k, decision, evidence=evidence, curve=curve)

    def norms(self, control: Control, profile: LagProfile) -> Array:
        """What the gauge looked at: where it remembers probes, all of them."""
        return self.gauge.norms(_with(profile, control.evidence))

    def assess(self, control: Control, k: int) -> TruncationDecision | None:
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
