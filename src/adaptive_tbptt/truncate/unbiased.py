"""Every lag on average: draw a context for each window, and weight it by its probability.

A window is cut at its levels, c_0 = 0 < c_1 < ... < c_J. Level j runs with probability P_j, and its
part of the gradient is divided by P_j:

    E sum_{j run} Delta_j / P_j = sum_j Delta_j

The mean is the gradient of the window with all c_J steps of context, whatever the probabilities.
ARTBP (Tallec and Ollivier, 2017) and randomised telescopes (Beatson and Adams, 2019) are of this
family. The identity holds at fixed parameters. The states that windows start from come from
slightly older parameters, as in every loop that carries its state.

A context that always runs has the probability 1. `base` chooses it: none for the detach loop, or as
much as a tolerated bias asks for. A measured bias tells how large the rest is, not whether it
matters. On the plateau of the copy task, long lags hold a few per cent of the gradient, and they
alone lead out.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from .. import defaults
from ..errors import require_whole
from ..estimate.added_noise import added_noise
from ..estimate.level_sums import LevelSums
from ..estimate.truncation import TruncationDecision
from ..measure.sampling import Evidence, Request
from .controller import Context, Controller, TruncationState
from .fixed import FixedTruncation

GOLDEN = (math.sqrt(5) - 1) / 2
FIRST = 0.5  # the largest probability of the first random level, as for the flip of a coin


def draw(seed: int, window: float) -> float:
    """Return a number in [0, 1): uniform over seeds, and spread evenly over windows.

    Numbers are spaced by the golden ratio from a random start. Independent numbers would leave gaps
    between the windows that run a rare level, and the noise of those gaps. Every n-th number is as
    evenly spread, so data that repeat every n windows see every level.
    """
    return (random.Random(seed).random() + window * GOLDEN) % 1.0


@dataclass(frozen=True)
class Unbiased(Controller):
    """A random context beyond the one that `base` chooses: unbiased up to k_max.

    The random levels are 1, 2, 4, ... times `losses` steps, as far as they exceed the context that
    always runs, and k_max. Each has `fall` times the probability of the one before. The first has
    the probability that makes the random levels cost `share` of the rest of the window on average,
    at most 1/2. Multiples of `losses` are window boundaries, whose states are held.

    Attributes:
        k_max: the longest context; lags further back are cut.
        share: expected steps of the random levels, relative to those that always run.
        fall: probability of each level relative to the one before it.
        seed: of the draws, which depend only on it and on the steps trained so far.
        base: chooses the context that always runs: `FixedTruncation(0)` for none, `BestGuess` or
            `BiasTolerance` with a k_max that is not larger.

    Choosing k_max: it bounds memory. Choosing share: smaller values cost less and add noise, since
    rare levels have larger weights.

    If `base` measures by level, a log keeps two numbers per estimate, for windows of `losses`
    losses: `random.context`, the mean context, and `random.noise`, by what share drawing increases
    the mean squared norm of a window's gradient.

    Clipping acts on the weighted gradient. A clipped gradient is no longer unbiased.

    >>> Unbiased(k_max=80).levels(losses=10)
    ((10, 0.08), (20, 0.04), (40, 0.02), (80, 0.01))
    >>> Unbiased(k_max=80).expected_context(losses=10)
    2.0
    >>> Unbiased(k_max=80, share=2).levels(losses=10, always=16)
    ((16, 1.0), (20, 0.5), (40, 0.25), (80, 0.125))
    """

    k_max: int = defaults.LAGS
    share: float = 0.2
    fall: float = 0.5
    seed: int = 0
    base: Controller = field(default_factory=lambda: FixedTruncation(0))

    def __post_init__(self) -> None:
        require_whole(k_max=self.k_max)
        if self.k_max < 1:
            raise ValueError(f"k_max must be at least 1 step of context, got {self.k_max}")
        if not self.share > 0.0:
            raise ValueError(f"share must be positive, got {self.share}: 0.2 adds 20 % of steps")
        if not 0.0 < self.fall <= 1.0:
            raise ValueError(f"fall must be in (0, 1], got {self.fall}")
        if self.base.k_max > self.k_max:
            raise ValueError(
                f"base may choose up to {self.base.k_max} steps of context, more than "
                f"k_max={self.k_max}: raise k_max, or lower that of base"
            )

    def levels(self, losses: int, always: int = 0) -> tuple[tuple[int, float], ...]:
        """Return contexts and their probabilities.

        Args:
            losses: K2 of the window.
            always: the context that runs in every window.
        """
        sure = ((always, 1.0),) if always else ()
        if always >= self.k_max:
            return sure
        doubled = (losses << i for i in range(int(self.k_max).bit_length()))
        contexts = [*(c for c in doubled if always < c < self.k_max), self.k_max]
        odds = [self.fall**i for i in range(len(contexts))]
        edges = pairwise([always, *contexts])
        steps = sum(odd * (b - a) for odd, (a, b) in zip(odds, edges, strict=True))
        first = min(FIRST, self.share * (losses + always) / steps)
        return (*sure, *((c, first * odd) for c, odd in zip(contexts, odds, strict=True)))

    def expected_context(self, losses: int, always: int = 0) -> float:
        """Return the mean number of steps of context that a window runs."""
        levels = ((0, 1.0), *self.levels(losses, always))
        return sum(chance * (c - before) for (before, _), (c, chance) in pairwise(levels))

    def context(self, state: TruncationState, losses: int, step: int) -> Context:
        """Draw the context of this window, and the factor at the younger end of each level."""
        always = self.base.context(state, losses, step)
        # One number decides all levels, so that a level runs only with those before it.
        drawn = draw(self.seed, step / losses)
        levels = ((0, 1.0), *self.levels(losses, always.k))
        run = [level for level in levels if drawn < level[1]]
        factors = tuple((c, p / q) for (c, p), (_, q) in pairwise(run) if p != q)
        return Context(run[-1][0], factors)

    # What is measured, and what it decides, is up to `base`.

    def request(self, state: TruncationState, losses: int | None) -> Request | None:
        """Return what `base` measures."""
        return self.base.request(state, losses)

    def init(self) -> TruncationState:
        """Return how `base` starts."""
        return self.base.init()

    def update(self, state: TruncationState, evidence: Evidence) -> TruncationState:
        """Let `base` choose the context that always runs."""
        return self.base.update(state, evidence)

    def assess(self, state: TruncationState, k: int) -> TruncationDecision | None:
        """Ask `base`."""
        return self.base.assess(state, k)

    def brief(self, state: TruncationState, evidence: Evidence) -> dict[str, Any]:
        """Return what `base` keeps, and what drawing costs and adds to the gradient's noise."""
        kept = self.base.brief(state, evidence)
        if not isinstance(evidence, LevelSums) or state.k is None:
            return kept
        levels, losses = self.levels(evidence.losses, state.k), evidence.losses
        random = {
            "context": self.expected_context(losses, state.k),
            "noise": added_noise(evidence, levels),
        }
        return {**kept, "random": {name: float(f"{v:.4g}") for name, v in random.items()}}
