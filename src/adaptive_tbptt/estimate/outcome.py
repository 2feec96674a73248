"""What came of choosing a truncation length: a number, the reason for it, and a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """Why a truncation length was chosen; the value is the reason in words.

    Attributes:
        MET: a k between k_min and k_max meets delta.
        MET_AT_MINIMUM: k_min meets it already.
        WINDOW_TOO_SHORT: met, but past tau, by the fitted decay alone.
        BEYOND_MAXIMUM: only a k above k_max would; k_max is used.
        NO_DECAY: beta >= 1, so nothing is bounded; k_max is used.
        NO_BOUND: what is cut may outweigh what is kept at every k; k_max is used.
        UNRESOLVED: noise hides the answer; more samples are needed.
        HELD_BACK: a wrapper keeps k below the one that meets delta.
    """

    MET = "met"
    MET_AT_MINIMUM = "met already at k_min"
    WINDOW_TOO_SHORT = "met by the fitted decay alone, too few lags were measured to see it"
    BEYOND_MAXIMUM = "met only beyond k_max"
    NO_DECAY = "the gradient does not decay"
    NO_BOUND = "the relative bias has no bound"
    UNRESOLVED = "hidden by noise, more samples are needed"
    HELD_BACK = "held back by a wrapper"

    @property
    def met(self) -> bool:
        """Whether the chosen k keeps the bias below delta."""
        return self in (Outcome.MET, Outcome.MET_AT_MINIMUM, Outcome.WINDOW_TOO_SHORT)


@dataclass(frozen=True)
class Limits:
    """What a choice of k is bound by.

    Attributes:
        delta: tolerated relative bias of the gradient, in (0, 1).
        k_min: smallest k to choose.
        k_max: largest k to choose, also where delta cannot be met.
        k_now: the k in use; where noise leaves several k open, the choice stays close to it.
    """

    delta: float
    k_min: int = 1
    k_max: int = 100
    k_now: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.delta < 1.0:
            raise ValueError(
                f"delta must be in (0, 1), got {self.delta}: it is the tolerated relative bias of "
                "the gradient, 0.1 means 10 %"
            )
        if self.k_min < 0:
            raise ValueError(
                f"k_min must not be negative, got {self.k_min}: k counts steps back in time"
            )
        if self.k_min > self.k_max:
            raise ValueError(
                f"k_min must not exceed k_max, got k_min={self.k_min} and k_max={self.k_max}"
            )


@dataclass(frozen=True)
class TruncationDecision:
    """The chosen truncation length, and why.

    Attributes:
        k: truncation length; the gradient keeps lags 0..k.
        relative_bias: the relative bias at `k`, or a bound on it; infinite where there is none.
        outcome: what happened; `outcome.met` tells whether delta is kept.
        message: the outcome as a sentence.
        delta: the tolerance that was asked for.
        beta: the decay rate behind it.
        tau: the lag from which the rate was fitted.
    """

    k: int
    relative_bias: float
    outcome: Outcome
    message: str
    delta: float
    beta: float
    tau: int
