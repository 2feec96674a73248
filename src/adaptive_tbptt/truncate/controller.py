"""Controllers: from one lag profile to the next truncation length. They never see the model.

A controller is a frozen value. What it remembers goes in and comes out as a `TruncationState`, so
it can be logged, saved, resumed and tested without a model. `wrappers.py` has controllers that
modify another one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from typing import Any

from ..estimate.bias import BiasCurve
from ..estimate.contributions import Contributions
from ..estimate.lag_profile import Array, LagProfile
from ..estimate.truncation import Outcome, TruncationDecision


@dataclass(frozen=True)
class TruncationState:
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
    inner: TruncationState | None = None
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
    def from_dict(saved: dict[str, Any]) -> TruncationState:
        """Undo `to_dict`."""
        decision = saved["decision"]
        if decision is not None:
            decision = TruncationDecision(**{**decision, "outcome": Outcome[decision["outcome"]]})
        inner = None if saved["inner"] is None else TruncationState.from_dict(saved["inner"])
        evidence = tuple(Contributions.from_dict(c) for c in saved.get("evidence", ()))
        return TruncationState(
            saved["k"], decision, tuple(saved["memory"]), inner, evidence, saved.get("probed", 0)
        )


class Controller(ABC):
    """Chooses the truncation length. Classes below it are final."""

    def __repr__(self) -> str:
        # A checkpoint compares it; the default would hold an address in memory.
        return f"{type(self).__name__}()"

    @property
    @abstractmethod
    def lags(self) -> int:
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
    def init(self) -> TruncationState:
        """Return what holds before the first estimate."""

    @abstractmethod
    def update(self, control: TruncationState, profile: LagProfile) -> TruncationState:
        """Return what holds after a probe; it may ask for another one with `wants_more`."""

    def norms(self, control: TruncationState, profile: LagProfile) -> Array:
        """`(lags, samples)`: the norms behind its last estimate, whose newest probe is given."""
        return profile.measured

    @abstractmethod
    def assess(self, control: TruncationState, k: int) -> TruncationDecision | None:
        """Say what its last estimate means for a k that something else chose; None if nothing."""
