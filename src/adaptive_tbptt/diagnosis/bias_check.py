"""Was delta kept? The relative bias at a given K, measured on data of your choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

from torch import nn

from .. import defaults
from ..data.nest import Nest
from ..data.stream import Stream
from ..estimate.level_bias import LevelCurve, level_bias
from ..measure.sampling import LevelRequest
from ..model.checks import refuse_single_losses
from ..model.objective import CountLosses, Objective
from ..model.recurrent import LossFn, Recurrent
from .sampling import GROUPS, SIZE, Sampling, as_stream

Verdict = Literal["kept", "broken", "not resolved"]


@dataclass(frozen=True)
class BiasCheck:
    """The measured relative bias of truncating at k.

    Attributes:
        k: truncation length checked.
        losses: K2 of the gradient checked; Theorem 1 has K2 = 1.
        relative: ||E g_K - E g|| / ||E g||; NaN if noise hides the gradient.
        low: lower limit.
        high: upper limit; infinite if noise hides the gradient.
        level: coverage of [low, high].
        samples: losses backpropagated.
        lags: lags of the reference gradient.
    """

    k: int
    losses: int
    relative: float
    low: float
    high: float
    level: float
    samples: int
    lags: int

    def verdict(self, delta: float) -> Verdict:
        """Say whether the relative bias is at most delta."""
        if self.high <= delta:
            return "kept"
        return "broken" if self.low > delta else "not resolved"

    def __str__(self) -> str:
        if not math.isfinite(self.high):
            return f"K={self.k}: noise hides the gradient of {self.samples} losses"
        return (
            f"K={self.k}: relative bias {self.relative:.3g} [{self.low:.3g}, {self.high:.3g}], "
            f"{self.samples} losses against {self.lags} lags"
        )


def check_bias(
    model: nn.Module | Recurrent,
    loss_fn: LossFn,
    data: Stream | tuple[Nest, Nest],
    k: int | Sequence[int],
    *,
    losses: int = 1,
    lags: int = defaults.PROBE_LAGS,
    segments: int = defaults.CHECK_SEGMENTS,
    burn_in: int = defaults.BURN_IN,
    level: float = defaults.LEVEL,
    count_losses: CountLosses | None = None,
    seed: int = 0,
) -> list[BiasCheck]:
    """Measure the relative bias of truncating at k on random segments.

    `diagnose` and `MeasuredGauge` measure in the same way. Pass data that K was not chosen on.

    Args:
        model: any recurrent module, at the parameters and in the mode to be checked.
        loss_fn: `loss_fn(outputs, targets)`; with `losses=1` a mean over time and batch.
        data: a stream, or a pair `(inputs, targets)` laid out as the model takes it.
        k: truncation length, or several.
        losses: K2, losses per window. 1 checks single losses, as the theory does; K checks the
            paper's training windows.
        lags: lags of the reference gradient; take them well above k.
        segments: random segments; more of them narrow the interval.
        burn_in: steps that warm up the state.
        level: coverage of the interval.
        count_losses: as in `AdaptiveTBPTT`.
        seed: of the segments.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> data = torch.randn(300, 8, 3), torch.randn(300, 8, 8)
    >>> (found,) = check_bias(nn.RNN(3, 8), nn.functional.mse_loss, data, 20, lags=60)
    >>> found.verdict(0.1)
    'kept'
    """
    objective = Objective.of(model, loss_fn, count_losses)
    stream = as_stream(data, objective.recurrent)
    ks = [int(k)] if isinstance(k, Integral) else [int(one) for one in k]  # type: ignore[union-attr]
    for one in ks:
        if not 0 <= one < lags:
            raise ValueError(f"k must be in [0, {lags - 1}], below the lags, got {one}")
    how = Sampling(burn_in=burn_in, level=level, seed=seed)
    if losses == 1:
        refuse_single_losses(objective, stream.peek(64))
    contexts = tuple(sorted({0, *ks, lags}))
    curve = measure_levels(objective, stream, contexts, losses, segments, how)
    return [check_of(curve, one) for one in ks]


def check_of(curve: LevelCurve, k: int) -> BiasCheck:
    """Read one k off a measured curve; k must be one of its contexts."""
    low, high = curve.interval_at(k)
    return BiasCheck(
        k, curve.losses, curve.relative_at(k), low, high, curve.level, curve.samples, curve.lags
    )


def measure_levels(
    objective: Objective,
    stream: Stream,
    contexts: tuple[int, ...],
    losses: int,
    segments: int,
    how: Sampling,
) -> LevelCurve:
    """Measure the bias of every context on `segments` random segments."""
    how.require(segments)
    request = LevelRequest(contexts, losses, segments, GROUPS, SIZE)
    sums = request.measure(how.source(objective, stream))
    return level_bias(sums, how.level)
