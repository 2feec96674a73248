"""Choose the smallest K whose bias is below delta: kappa(delta, theta), Eq. 23."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from .. import defaults
from ..errors import require_whole


class Outcome(Enum):
    """Why a truncation length was chosen; the value is the reason in words.

    Attributes:
        MET: a k between k_min and k_max meets delta.
        MET_AT_MINIMUM: k_min meets it already.
        WINDOW_TOO_SHORT: met, but past tau, by the fitted decay alone.
        BEYOND_MAXIMUM: only a k above k_max would meet it; k_max is used.
        NO_DECAY: beta >= 1, so there is no bound; k_max is used.
        NO_BOUND: at every k the cut part may outweigh the kept part; k_max is used.
        UNRESOLVED: noise hides the answer; more samples are needed.
        HELD_BACK: a wrapper keeps k below the one that meets delta.
        BEST_GUESS: the estimate at k meets delta; its upper limit may not.
        HIDDEN: noise hides the best guess; k does not fall.
    """

    MET = "met"
    MET_AT_MINIMUM = "met already at k_min"
    WINDOW_TOO_SHORT = "met only by the fitted decay, measure more lags to see it"
    BEYOND_MAXIMUM = "met only beyond k_max"
    NO_DECAY = "the gradient does not decay"
    NO_BOUND = "the relative bias has no bound"
    UNRESOLVED = "hidden by noise, more samples are needed"
    HELD_BACK = "held back by a wrapper"
    BEST_GUESS = "the best guess"
    HIDDEN = "noise hides the best guess"

    @property
    def met(self) -> bool:
        """Whether the chosen k keeps the bias below delta."""
        return self in (Outcome.MET, Outcome.MET_AT_MINIMUM, Outcome.WINDOW_TOO_SHORT)


@dataclass(frozen=True)
class Limits:
    """The constraints on a choice of k.

    Attributes:
        delta: tolerated relative bias of the gradient, in (0, 1).
        k_min: smallest k to choose.
        k_max: largest k to choose, even if delta cannot be met.
        k_now: the k in use. If noise leaves several k open, the choice moves away from it only as
            far as the evidence demands; None takes the largest of them.
    """

    delta: float
    k_min: int = defaults.K_MIN
    k_max: int = defaults.K_MAX
    k_now: int | None = None

    def __post_init__(self) -> None:
        require_whole(k_min=self.k_min, k_max=self.k_max)
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
        relative_bias: the relative bias at `k`, or a bound on it; infinite if there is none.
        outcome: what happened; `outcome.met` tells whether delta is kept.
        message: the outcome as a sentence.
        delta: the tolerance; None if there was none.
        beta: the decay rate behind the choice.
        tau: the lag from which the rate was fitted.
    """

    k: int
    relative_bias: float
    outcome: Outcome
    message: str
    delta: float | None
    beta: float
    tau: int


class Curve(Protocol):
    """The relative bias against the truncation length, measured or bounded."""

    @property
    def beta(self) -> float:
        """Decay rate."""

    @property
    def tau(self) -> int:
        """Lag from which the rate was fitted."""

    def relative_at(self, k: int) -> float:
        """Return the relative bias at k, or a bound on it."""

    def choose(self, limits: Limits) -> tuple[int, Outcome]:
        """Return the k to use, and why."""

    def explain(self, k: int, outcome: Outcome, limits: Limits) -> str:
        """Say in a sentence what `choose` found."""


def choose_truncation(
    bias: Curve,
    *,
    delta: float,
    k_min: int = defaults.K_MIN,
    k_max: int = defaults.K_MAX,
    k_now: int | None = None,
) -> TruncationDecision:
    """Return the smallest k in [k_min, k_max] with Delta(k) < delta, or say why there is none.

    Args:
        bias: from `bias_bound`, or measured by level.
        delta: the tolerated relative bias; see `Limits`.
        k_min: smallest k to return.
        k_max: largest k to return.
        k_now: the k in use.

    Choosing delta: bias multiplies Theorem 2's bound on ||g||^2 by 1 / (1 - delta): 1.11 at 0.1, 2
    at 0.5 and 10 at 0.9. A larger delta gives a smaller k, and so more updates from the same data.
    The paper tries 0.9, 0.5 and 0.1.

    >>> import numpy as np
    >>> from adaptive_tbptt import bias_bound, fit_decay
    >>> phi = 0.5 ** np.arange(41.0)
    >>> choice = choose_truncation(bias_bound(phi, fit_decay(phi)), delta=0.1)
    >>> choice.k, choice.message
    (3, 'k=3 meets delta=0.1 with a bound of 0.0714')
    """
    limits = Limits(delta, k_min, k_max, k_now)
    k, outcome = bias.choose(limits)
    return TruncationDecision(
        k=k,
        relative_bias=bias.relative_at(k),
        outcome=outcome,
        message=bias.explain(k, outcome, limits),
        delta=delta,
        beta=bias.beta,
        tau=bias.tau,
    )
