"""Choose the smallest K whose bias is below delta: kappa(delta, theta), Eq. 23."""

from __future__ import annotations

from typing import Protocol

from .outcome import Limits, Outcome, TruncationDecision


class Curve(Protocol):
    """The relative bias against the truncation length, however it was found."""

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
    k_min: int = 1,
    k_max: int = 100,
    k_now: int | None = None,
) -> TruncationDecision:
    """Return the smallest k in [k_min, k_max] with Delta(k) < delta, or say why there is none.

    Args:
        bias: from `bias_bound`, or measured by level.
        delta: tolerated relative bias of the gradient, in (0, 1).
        k_min: smallest k to return.
        k_max: largest k to return; used whenever delta cannot be met.
        k_now: the k in use. Where the bias was measured and noise leaves several k open, the
            choice moves only as far as the evidence demands; None takes the largest of them.

    Choosing delta: bias worsens the bound of Theorem 2 on ||g||^2 by 1 / (1 - delta), that is by
    11 % at 0.1, twice at 0.5 and ten times at 0.9; a larger delta gives a smaller k and so more
    updates for the same data. The paper tries 0.9, 0.5 and 0.1.

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
