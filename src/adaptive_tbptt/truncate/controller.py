"""Controllers: from one measurement to the next truncation length. They never see the model.

A controller is a frozen value. Its memory goes in and comes out as a `TruncationState`, which can
be logged, saved, resumed and tested without a model. `wrappers.py` has controllers that modify
another one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from ..estimate.level_sums import LevelSums
from ..estimate.truncation import Curve, Outcome, TruncationDecision
from ..measure.sampling import Evidence, Request


@dataclass(frozen=True)
class TruncationState:
    """What a controller has decided and remembers.

    Attributes:
        k: truncation length to use now; None asks for an estimate before the first window.
        decision: the estimate behind it, if there was one.
        memory: numbers a wrapper carries from one estimate to the next.
        inner: the state of the wrapped controller.
        evidence: measurements of recent estimates that still count.
        curve: the bias curve behind the decision; not saved.
    """

    k: int | None
    decision: TruncationDecision | None = None
    memory: tuple[float, ...] = ()
    inner: TruncationState | None = None
    evidence: LevelSums | None = field(default=None, repr=False, compare=False)
    curve: Curve | None = field(default=None, repr=False, compare=False)

    @property
    def known_k(self) -> int:
        """The truncation length, once an estimate gave one."""
        assert self.k is not None, "an estimate was due before the first window"
        return self.k

    def to_dict(self) -> dict[str, Any]:
        """Return plain values and tensors, for a checkpoint."""
        decision = None
        if self.decision is not None:
            decision = {**asdict(self.decision), "outcome": self.decision.outcome.name}
        evidence = None
        if self.evidence is not None:
            evidence = self.evidence.to_dict()
            for name in ("vectors", "counts"):
                evidence[name] = torch.from_numpy(evidence[name])
        return {
            "k": self.k,
            "decision": decision,
            "memory": list(self.memory),
            "inner": None if self.inner is None else self.inner.to_dict(),
            "evidence": evidence,
        }

    @staticmethod
    def from_dict(saved: dict[str, Any]) -> TruncationState:
        """Undo `to_dict`."""
        decision = saved["decision"]
        if decision is not None:
            before = {"BEST_PACE": "BEST_GUESS", "KEPT": "HIDDEN"}  # names of older checkpoints
            name = before.get(decision["outcome"], decision["outcome"])
            decision = TruncationDecision(**{**decision, "outcome": Outcome[name]})
        inner = None if saved["inner"] is None else TruncationState.from_dict(saved["inner"])
        evidence = saved.get("evidence") or None  # old checkpoints hold a list
        if isinstance(evidence, dict):
            arrays = {name: evidence[name].cpu().numpy() for name in ("vectors", "counts")}
            evidence = LevelSums.from_dict({**evidence, **arrays})
        else:
            evidence = None
        return TruncationState(saved["k"], decision, tuple(saved["memory"]), inner, evidence)


class Context(NamedTuple):
    """How far back one window looks.

    Attributes:
        k: steps before the first loss that the gradient flows through.
        factors: pairs (steps back, factor): the backward pass multiplies the gradient of the state
            by the factor there. Steps back are below k; no pairs for the plain gradient.
    """

    k: int
    factors: tuple[tuple[int, float], ...] = ()


class Controller(ABC):
    """Chooses the truncation length. Classes below it are final."""

    def __repr__(self) -> str:
        # A checkpoint compares it; Python's default contains an address in memory.
        return f"{type(self).__name__}()"

    @property
    @abstractmethod
    def k_max(self) -> int:
        """The largest k it may choose; the loop keeps states that far back."""

    @abstractmethod
    def request(self, state: TruncationState, losses: int | None) -> Request | None:
        """Return what to measure for the next estimate; None if there is none to make.

        Args:
            state: the current state.
            losses: K2 of the training windows; None if it follows K.
        """

    @abstractmethod
    def init(self) -> TruncationState:
        """Return the state before the first estimate."""

    @abstractmethod
    def update(self, state: TruncationState, evidence: Evidence) -> TruncationState:
        """Return the state after a measurement."""

    @abstractmethod
    def context(self, state: TruncationState, losses: int, step: int) -> Context:
        """Return how far back a window looks.

        Args:
            state: the current state; its k is known.
            losses: K2 of the window.
            step: steps trained on before the window. A random controller seeds its draw with it,
                so that the draw is the same after a resume and on all processes.
        """

    @abstractmethod
    def assess(self, state: TruncationState, k: int) -> TruncationDecision | None:
        """Judge a k that a wrapper chose by the last estimate; None if there is no estimate."""

    @abstractmethod
    def brief(self, state: TruncationState, evidence: Evidence) -> dict[str, Any]:
        """Return what a log should keep of the last estimate; `evidence` is its newest part."""
