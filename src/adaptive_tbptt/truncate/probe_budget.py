"""TODO."""

from __future__ import annotations

from typing import NamedTuple


class ProbeBudget(NamedTuple):
    """How many probes an estimate takes.

    Attributes:
        fresh: at least so many; after every so many one sees whether they suffice.
        budget: at most so many, while the answer is not resolved, or rests on fewer than this in
            all: the first estimate spends the whole budget.
        remembered: of earlier estimates, so many still count: parameters move slowly.
    """

    fresh: int = 1
    budget: int = 1
    remembered: int = 0


SEVERAL = ProbeBudget(fresh=4, budget=16, remembered=28)
