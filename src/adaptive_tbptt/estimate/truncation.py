"""Choose the smallest K whose bound is below delta: kappa(delta, theta), Eq. 23."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from .bias import Array, BiasCurve
from .measured_curve import MeasuredCurve


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
    WINDOW_TOO_SHORT = "met by the fitted decay alone, the window is too short to see it"
    BEYOND_MAXIMUM = "met only beyond k_max"
    NO_DECAY = "the gradient does not decay"
    NO_BOUND = "the relative bias has no bound"
    UNRESOLVED = "hidden by noise, more samples are needed"
    HELD_BACK = "held back by a wrapper"

    @property
    def met(self) -> bool:
        """Whether the chosen k keeps the bound below delta."""
        return self in (Outcome.MET, Outcome.MET_AT_MINIMUM, Outcome.WINDOW_TOO_SHORT)


@dataclass(frozen=True)
class TruncationDecision:
    """The chosen truncation length, and why.

    Attributes:
        k: truncation length; the gradient keeps lags 0..k.
        relative_bias: bound on the relative bias at `k`; infinite where there is none.
        outcome: what happened; `outcome.met` tells whether delta is kept.
        message: the outcome as a sentence.
        delta: the tolerance that was asked for.
        beta: the decay rate behind the bound.
        tau: the lag from which it was fitted.
    """

    k: int
    relative_bias: float
    outcome: Outcome
    message: str
    delta: float
    beta: float
    tau: int


def check_tolerance(delta: float, k_min: int, k_max: int) -> None:
    """Refuse a tolerance or limits that make no sense."""
    if not 0.0 < delta < 1.0:
        raise ValueError(
            f"delta must be in (0, 1), got {delta}: it is the tolerated relative bias of the "
            "gradient, 0.1 means 10 %"
        )
    if k_min < 1:
        raise ValueError(f"k_min must be at least 1, got {k_min}: k counts steps back in time")
    if k_min > k_max:
        raise ValueError(f"k_min must not exceed k_max, got k_min={k_min} and k_max={k_max}")


def choose_truncation(
    bias: BiasCurve,
    *,
    delta: float,
    k_min: int = 1,
    k_max: int = 100,
    k_now: int | None = None,
) -> TruncationDecision:
    """Return the smallest k in [k_min, k_max] with Delta(k) < delta, or say why there is none.

    Args:
        bias: from `bias_bound`.
        delta: tolerated relative bias of the gradient, in (0, 1).
        k_min: smallest k to return.
        k_max: largest k to return; used whenever delta cannot be met.
        k_now: the k in use. Where the bias was measured and noise leaves several k open, it is
            left only as far as the evidence demands; None takes the largest of them.

    Choosing delta: bias worsens the bound of Theorem 2 on ||g||^2 by 1 / (1 - delta), that is by
    11 % at 0.1, twice at 0.5 and ten times at 0.9; a larger delta gives a smaller k and so more
    updates for the same data. The paper tries 0.9, 0.5 and 0.1.

    >>> from adaptive_tbptt import bias_bound, fit_decay
    >>> phi = 0.5 ** np.arange(41.0)
    >>> choice = choose_truncation(bias_bound(phi, fit_decay(phi)), delta=0.1)
    >>> choice.k, choice.message
    (3, 'k=3 meets delta=0.1 with a bound of 0.0714')
    """
    check_tolerance(delta, k_min, k_max)
    k, outcome = _choose(bias, delta, k_min, k_max, k_now)
    bound = bias.relative_at(k)
    return TruncationDecision(
        k=k,
        relative_bias=bound,
        outcome=outcome,
        message=_sentence(bias, outcome, delta, k, (k_min, k_max), bound),
        delta=delta,
        beta=bias.fit.beta,
        tau=bias.fit.tau,
    )


def smallest_k(
    log_relative: Array, log_beta: Array, delta: float, k_min: int, k_max: int
) -> NDArray[np.int64]:
    """Return the smallest k >= k_min that meets delta, for many curves; k_max + 1 for none.

    Beyond the window the bound falls as the fitted decay does.

    Args:
        log_relative: `(lags + 1, curves)`, nonincreasing in k.
        log_beta: `(curves,)`.
        delta: the tolerance.
        k_min: smallest k to return.
        k_max: largest k of interest.
    """
    lags = len(log_relative) - 1
    beyond = np.arange(1, max(k_max - lags, 0) + 1)[:, None]
    with np.errstate(invalid="ignore"):  # inf - inf, where there is no bound
        further = log_relative[-1] + beyond * np.minimum(log_beta, 0.0)
    met = np.vstack([log_relative, further]) < math.log(delta)
    first = np.where(met.any(axis=0), met.argmax(axis=0), k_max + 1)
    return np.minimum(np.maximum(first, k_min), k_max + 1)


def _choose(
    bias: BiasCurve, delta: float, k_min: int, k_max: int, k_now: int | None
) -> tuple[int, Outcome]:
    if not bias.fit.decays:
        return k_max, Outcome.NO_DECAY
    seen = bias.fit.tau  # past it a bound is the fit's word alone, a measurement past the window
    if isinstance(bias, MeasuredCurve):
        seen = bias.lags
        low, high = open_range(bias, delta, k_min, k_max)
        if bias.hidden or not is_resolved(low, high):
            return min(max(low, high if k_now is None else k_now), high), Outcome.UNRESOLVED
    elif bias.hidden:
        return k_max, Outcome.UNRESOLVED
    if not np.isfinite(bias.relative).any():
        return k_max, Outcome.NO_BOUND
    k = _first_met(bias, delta, k_min, k_max)
    if k > k_max:
        return k_max, Outcome.BEYOND_MAXIMUM
    if k == k_min < k_max:
        return k, Outcome.MET_AT_MINIMUM
    return k, Outcome.WINDOW_TOO_SHORT if k > seen else Outcome.MET


def open_range(bias: MeasuredCurve, delta: float, k_min: int, k_max: int) -> tuple[int, int]:
    """Return the smallest k that may meet delta, and the smallest that surely does."""
    if bias.hidden:
        return k_min, k_max
    may = np.maximum.accumulate(bias.low[::-1])[::-1] < delta
    low = int(may.argmax()) if may.any() else k_max
    high = _first_met(bias, delta, k_min, k_max)
    return min(max(low, k_min), k_max), min(high, k_max)


def is_resolved(low: int, high: int) -> bool:
    """Whether the k that surely suffices is within 20 % of the smallest that may."""
    return high <= max(1.2 * low, low + 1)


def _first_met(bias: BiasCurve, delta: float, k_min: int, k_max: int) -> int:
    log_beta = np.array([bias.fit.log_beta])
    return int(smallest_k(bias.log_relative[:, None], log_beta, delta, k_min, k_max)[0])


def _sentence(
    bias: BiasCurve, outcome: Outcome, delta: float, k: int, limits: tuple[int, int], bound: float
) -> str:
    fit, (k_min, k_max) = bias.fit, limits
    if outcome is Outcome.MET:
        return f"k={k} meets delta={delta:g} with a bound of {bound:.3g}"
    if outcome is Outcome.MET_AT_MINIMUM:
        return f"delta={delta:g} is met already at k_min={k}, with a bound of {bound:.3g}"
    if outcome is Outcome.WINDOW_TOO_SHORT:
        where = "the window" if isinstance(bias, MeasuredCurve) else f"tau={fit.tau}"
        return (
            f"k={k} meets delta={delta:g}, but past {where}, where the bound rests on the "
            "fitted decay alone; measure a longer window"
        )
    if outcome is Outcome.UNRESOLVED:
        if not isinstance(bias, MeasuredCurve):
            return (
                f"noise hides the gradient, so there is no bound: more samples are needed; "
                f"using {k_max}"
            )
        if bias.hidden:
            return (
                f"noise hides the gradient: without one, {bias.samples} samples would look like "
                f"this {bias.chance:.0%} of the time; using k={k}"
            )
        low, high = open_range(bias, delta, k_min, k_max)
        return (
            f"{bias.samples} samples leave open which k between {low} and {high} meets "
            f"delta={delta:g}; using {k}"
        )
    if outcome is Outcome.NO_DECAY:
        return (
            f"the gradient does not decay (beta={fit.rate} >= 1 from lag {fit.tau} on), so "
            f"no k meets delta={delta:g}; using {k_max}"
        )
    if outcome is Outcome.NO_BOUND:
        return (
            f"the relative bias has no bound: what is cut outweighs what is kept at every k of "
            f"the window (beta={fit.rate}), so no k meets delta={delta:g}; using {k_max}"
        )
    far = 100 * k_max  # arbitrary: how far to look for the k that would do
    first = _first_met(bias, delta, 1, far)
    where = f"; {first} would" if first <= far else ""
    return f"no k up to {k_max} meets delta={delta:g}{where}; using {k_max}"
