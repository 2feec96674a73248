"""Wrap a controller to modify it: limits, buckets, a limit on the rate of change."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from ..errors import require_whole
from ..estimate.truncation import TruncationDecision
from ..measure.sampling import Evidence, Request
from .controller import Context, Controller, TruncationState


@dataclass(frozen=True)
class Wrapper(Controller):
    """Shared by wrappers that change the k another controller chose."""

    controller: Controller

    @property
    def k_max(self) -> int:
        """The largest k after the change."""
        return self.change(self.controller.k_max, None)

    @abstractmethod
    def change(self, k: int, before: int | None) -> int:
        """Return the k to use if the wrapped controller chose `k` and `before` is in use."""

    def request(self, state: TruncationState, losses: int | None) -> Request | None:
        """Return the request of the wrapped controller."""
        return self.controller.request(_inner(state), losses)

    def init(self) -> TruncationState:
        """Change the k that the wrapped controller starts with."""
        inner = self.controller.init()
        k = None if inner.k is None else self.change(inner.k, None)
        return TruncationState(k, inner.decision, inner=inner)

    def update(self, state: TruncationState, evidence: Evidence) -> TruncationState:
        """Let the wrapped controller choose, then change its choice."""
        inner = self.controller.update(_inner(state), evidence)
        assert inner.k is not None
        # A controller that starts with some k has chosen none before its first estimate.
        k = self.change(inner.k, state.k or None)
        # Report the bias at the k in use, not at the k that the wrapped controller chose.
        decision = inner.decision if k == inner.k else self.controller.assess(inner, k)
        return TruncationState(k, decision, inner=inner)

    def brief(self, state: TruncationState, evidence: Evidence) -> dict[str, Any]:
        """Return what the wrapped controller keeps."""
        return self.controller.brief(_inner(state), evidence)

    def context(self, state: TruncationState, losses: int, step: int) -> Context:
        """Return k: every window has the same until the next estimate."""
        return Context(state.known_k)

    def assess(self, state: TruncationState, k: int) -> TruncationDecision | None:
        """Ask the wrapped controller."""
        return self.controller.assess(_inner(state), k)


def _inner(state: TruncationState) -> TruncationState:
    assert state.inner is not None
    return state.inner


@dataclass(frozen=True)
class Limited(Wrapper):
    """Keep k in [low, high].

    Attributes:
        controller: the controller to wrap.
        low: smallest k to use.
        high: largest k to use.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        require_whole(low=self.low, high=self.high)
        if not 0 <= self.low <= self.high:
            raise ValueError(f"expected 0 <= low <= high, got low={self.low} and high={self.high}")

    def change(self, k: int, before: int | None) -> int:
        """Clip."""
        return min(max(k, self.low), self.high)


@dataclass(frozen=True)
class Bucketed(Wrapper):
    """Round k up to a bucket, so that the shapes of windows repeat (for torch.compile, say).

    Attributes:
        controller: the controller to wrap.
        buckets: allowed k, ascending; a k above all of them becomes the largest. Empty means
            powers of two.
    """

    buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(b < 1 for b in self.buckets) or list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"buckets must be ascending and at least 1, got {self.buckets}")

    def change(self, k: int, before: int | None) -> int:
        """Round up: a larger k never has a larger bound."""
        if not self.buckets:
            return 1 << (k - 1).bit_length() if k else 0
        return next((b for b in self.buckets if b >= k), self.buckets[-1])


@dataclass(frozen=True)
class RateLimited(Wrapper):
    """Let k change by at most a factor from one estimate to the next.

    Attributes:
        controller: the controller to wrap.
        factor: 2 means at most doubled and at most halved.
        fall: a separate factor for falling. Before a model has learnt long dependencies, hardly any
            gradient comes from far back. A small k then meets every tolerance, and with a small k
            the model never learns them. A k that starts large and falls slowly
            (`factor=math.inf, fall=1.05`) gives it time.
    """

    factor: float = 2.0
    fall: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("factor", self.factor), ("fall", self.fall)):
            if value is not None and not value > 1.0:
                raise ValueError(f"{name} must exceed 1, got {value}")

    def change(self, k: int, before: int | None) -> int:
        """Stay within the factors; round outwards, so that a small k can move at all."""
        if before is None:
            return k
        low = math.floor(before / (self.fall or self.factor))
        high = math.ceil(min(before * self.factor, self.k_max))
        return min(max(k, low), max(high, 1))
