"""When to estimate K."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .. import defaults
from ..estimate.truncation import Outcome
from ..measure.sampling import LevelRequest, Request
from .estimates import Estimate

EARLY = 4  # arbitrary: the first estimate need not wait until it is affordable
STEADY = 2  # arbitrary: how often the wait may double


class SoFar(NamedTuple):
    """What a loop has done.

    Attributes:
        estimates: estimates of K.
        trained: steps trained on.
        confirmed: newest estimates in a row that confirmed the K in use.
    """

    estimates: int
    trained: int
    confirmed: int = 0


def count_confirmed(history: Sequence[Estimate]) -> int:
    """Count the newest estimates in a row that confirmed the K in use.

    It stops at `STEADY`: the wait doubles no more often.
    """
    newest = history[-STEADY - 1 :]
    count = 0
    for before, after in zip(newest[-2::-1], newest[:0:-1], strict=True):
        if after.outcome != Outcome.BEST_GUESS.name or after.k != before.k:
            break
        count += 1
    return count


def steps_between(
    request: Request | None, asked: float | None, epoch: int | None, burn_in: int, so_far: SoFar
) -> int:
    """Return the steps from one estimate to the next.

    The paper's gauges estimate once per epoch. Parameters move fast at first, so `MeasuredGauge`
    estimates again each time that the trained steps have grown by a share. Neither reads more than
    that share of the steps of training, after the first estimate at trained parameters. An estimate
    that confirms the K in use doubles the wait for the next one, twice at most.

    Args:
        request: what an estimate measures.
        asked: estimates per epoch that the user asked for, whatever they cost; None for none.
        epoch: steps of an epoch; None if the stream's length is unknown.
        burn_in: steps before each measurement.
        so_far: what the loop has done.
    """
    by_level = isinstance(request, LevelRequest)
    if epoch is None and (asked is not None or not by_level):
        raise ValueError(
            "the length of the stream is unknown: pass estimate_every=, a number of steps, in "
            "place of estimates_per_epoch"
        )
    if asked is not None:
        return math.ceil((epoch or 0) / asked)
    cost = 0 if request is None else request.batches * (burn_in + request.steps)
    affordable = math.ceil(cost / defaults.ESTIMATE_SHARE)
    if not by_level:
        return max(epoch or 0, affordable)
    if so_far.trained == 0 or so_far.estimates == 0:
        return affordable // EARLY
    news = math.ceil(so_far.trained * defaults.ESTIMATE_SHARE)
    return max(affordable, news) << so_far.confirmed


def check_schedule(
    estimates_per_epoch: float | None, estimate_every: int | None, burn_in: int
) -> None:
    """Refuse a schedule that makes no sense."""
    if estimates_per_epoch is not None and estimates_per_epoch <= 0:
        raise ValueError(f"estimates_per_epoch must be positive, got {estimates_per_epoch}")
    if estimate_every is not None and estimate_every < 1:
        raise ValueError(f"estimate_every must be at least 1 step, got {estimate_every}")
    if burn_in < 0:
        raise ValueError(f"burn_in must not be negative, got {burn_in}")
