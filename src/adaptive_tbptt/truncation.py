"""Choose the smallest K whose bound is below delta: kappa(delta, theta), Eq. 23."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np

from .bias import BiasCurve


class Outcome(Enum):
    """Why a truncation length was chosen."""

    MET = "met"
    MET_AT_MINIMUM = "met already at k_min"
    MET_PAST_TAU = "met only where the bound rests on the fitted decay"
    BEYOND_MAXIMUM = "met only beyond k_max"
    WINDOW_TOO_SHORT = "the window is too short to see it met"
    NO_DECAY = "the gradient does not decay"
    NO_BOUND = "the relative bias has no bound"

    @property
    def met(self) -> bool:
        """Whether the chosen k keeps the bound below delta."""
        return self in (Outcome.MET, Outcome.MET_AT_MINIMUM, Outcome.MET_PAST_TAU)


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
    bias: BiasCurve, *, delta: float, k_min: int = 1, k_max: int = 100
) -> TruncationDecision:
    """Return the smallest k in [k_min, k_max] with Delta(k) < delta, or say why there is none.

    Args:
        bias: from `bias_bound`.
        delta: tolerated relative bias of the gradient, in (0, 1).
        k_min: smallest k to return.
        k_max: largest k to return; used whenever delta cannot be met.

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
    k, outcome = _choose(bias, delta, k_min, k_max)
    bound = bias.relative_at(k)
    return TruncationDecision(
        k=k,
        relative_bias=bound,
        outcome=outcome,
        message=_sentence(bias, outcome, delta, k, k_max, bound),
        delta=delta,
        beta=bias.fit.beta,
        tau=bias.fit.tau,
    )


def smallest_k(log_relative: np.ndarray, delta: float, k_min: int, k_max: int) -> np.ndarray:
    """Return the chosen k of many curves `(window + 1, curves)`; k_max where delta is not met."""
    met = log_relative[k_min : k_max + 1] < math.log(delta)
    return np.where(met.any(axis=0), k_min + met.argmax(axis=0), k_max)


def _choose(bias: BiasCurve, delta: float, k_min: int, k_max: int) -> tuple[int, Outcome]:
    if not bias.fit.decays:
        return k_max, Outcome.NO_DECAY
    if not np.isfinite(bias.relative).any():
        return k_max, Outcome.NO_BOUND
    met = np.flatnonzero(bias.log_relative < math.log(delta))
    if met.size == 0:
        short = k_max > bias.window
        return k_max, Outcome.WINDOW_TOO_SHORT if short else Outcome.BEYOND_MAXIMUM
    k = max(int(met[0]), k_min)  # Delta is nonincreasing: every larger k meets delta too
    if k > k_max:
        return k_max, Outcome.BEYOND_MAXIMUM
    if k == k_min:
        return k, Outcome.MET_AT_MINIMUM
    # Past tau the bound is the fit's word alone: a longer window would have seen for itself.
    return k, Outcome.MET_PAST_TAU if k > bias.fit.tau else Outcome.MET


def _sentence(
    bias: BiasCurve, outcome: Outcome, delta: float, k: int, k_max: int, bound: float
) -> str:
    fit = bias.fit
    if outcome is Outcome.MET:
        return f"k={k} meets delta={delta:g} with a bound of {bound:.3g}"
    if outcome is Outcome.MET_AT_MINIMUM:
        return f"delta={delta:g} is met already at k_min={k}, with a bound of {bound:.3g}"
    if outcome is Outcome.MET_PAST_TAU:
        return (
            f"k={k} meets delta={delta:g}, but past tau={fit.tau}, where the bound rests on the "
            "fitted decay; measure a longer window"
        )
    if outcome is Outcome.NO_DECAY:
        return (
            f"the gradient does not decay (beta={fit.beta:.4g} >= 1 from lag {fit.tau} on), so "
            f"no k meets delta={delta:g}; using {k_max}"
        )
    if outcome is Outcome.NO_BOUND:
        return (
            f"the relative bias has no bound: what is cut outweighs what is kept at every k of "
            f"the window (beta={fit.beta:.4g}), so no k meets delta={delta:g}; using {k_max}"
        )
    if outcome is Outcome.WINDOW_TOO_SHORT:
        return (
            f"no k within the window of {bias.window} lags meets delta={delta:g}, though k may be "
            f"up to {k_max}; using {k_max}; measure a longer window"
        )
    met = np.flatnonzero(bias.log_relative < math.log(delta))
    where = f"; {int(met[0])} would" if met.size else ""
    return f"no k up to {k_max} meets delta={delta:g}{where}; using {k_max}"
