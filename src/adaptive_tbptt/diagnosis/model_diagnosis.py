"""One call: how biased is my loop, and what would more context cost?"""

from __future__ import annotations

import math
import time

from torch import nn

from .. import defaults
from ..data.nest import Nest
from ..data.stream import Stream
from ..estimate.level_bias import level_bias
from ..estimate.level_sums import levels_up_to
from ..measure.sampling import LagRequest, LevelRequest
from ..model.checks import look, refuse_single_losses
from ..model.objective import CountLosses, Objective
from ..model.recurrent import LossFn, Recurrent
from ..truncate.gauges import PaperGauge
from .diagnosis_result import Diagnosis, Row
from .recommendation import reading_notes, recommend
from .sampling import GROUPS, SIZE, Sampling, as_stream
from .two_stages import measure_in_two_stages
from .window_cost import window_costs
from .window_memory import window_memory

SWAPPED = (
    ". There are {} rows. If these are steps, your data are (batch, time, ...): pass "
    "at.model.as_recurrent(model, batch_first=True), or SequenceStream(..., batch_first=True)"
)


def diagnose(
    model: nn.Module | Recurrent,
    loss_fn: LossFn,
    data: Stream | tuple[Nest, Nest],
    losses: int = defaults.LOSSES,
    *,
    delta: float = defaults.DELTA,
    lags: int | None = None,
    seconds: float = defaults.SECONDS,
    segments: int | None = None,
    bound: bool = False,
    count_losses: CountLosses | None = None,
    sampling: Sampling | None = None,
    show: bool = True,
) -> Diagnosis:
    """Measure how much of the gradient a training loop misses, and what more context would cost.

    Windows have `losses` steps that carry a loss. Every context (0 and powers of two) has a row:
    the relative bias of the gradient with its interval, and the time of a window relative to the
    plain detach loop. One pass measures all contexts, for any module.

    Args:
        model: any recurrent module, at the parameters and in the mode to be diagnosed.
        loss_fn: `loss_fn(outputs, targets)`. A loss that is not a mean over time, such as a loss
            normalised over the window, is measured over windows as you train with it.
        data: a stream, or a pair `(inputs, targets)` laid out as the model takes it.
        losses: steps per window of your loop; 1 asks about single losses, as the paper does.
        delta: the bias that you tolerate; the recommendation meets it.
        lags: longest context, the reference; None is 256, or less if the data are shorter.
        seconds: time limit of the measurement.
        segments: windows to backpropagate, instead of `seconds`.
        bound: also give the paper's bound, from norms of the state's gradient.
        count_losses: as in `AdaptiveTBPTT`, for masked targets.
        sampling: burn-in, mode, coverage and seed.
        show: show progress on standard error, once it takes longer than two seconds.

    Returns:
        `.rows`, `.recommendation`, `.figure()`, `.longest_window(gigabytes)`. The intervals cover
        the choice of windows from the same data. The bias beyond `lags` is extrapolated and
        reported in a note.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> data = torch.randn(400, 16, 3), torch.randn(400, 16, 8)
    >>> found = diagnose(nn.LSTM(3, 8), nn.functional.mse_loss, data, losses=10, lags=64)
    >>> found.rows[0].context, found.rows[0].bias < 0.3
    (0, True)
    """
    began = time.monotonic()
    how = sampling or Sampling()
    how.require(segments)
    objective = Objective.of(model, loss_fn, count_losses)
    stream = as_stream(data, objective.recurrent)
    if losses < 1:
        raise ValueError(f"losses must be at least 1 step, got {losses}")
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must be in (0, 1), got {delta}: 0.1 tolerates a bias of 10 %")
    source = how.source(objective, stream)
    lags = _fitting_lags(stream, lags, losses, source.warm_up_steps)
    first = stream.peek(64)
    look(objective, first, stream)
    if losses == 1:
        refuse_single_losses(objective, first)
    contexts = levels_up_to(lags)
    request = LevelRequest(contexts, losses, groups=GROUPS, size=SIZE)
    sums = measure_in_two_stages(source, request, how.level, (seconds, segments), show)
    curve = level_bias(sums, how.level)
    costs = window_costs(source, losses, contexts)
    bounds: list[float | None] = [None] * len(contexts)
    if bound:
        profile = LagRequest(lags, math.ceil(how.samples / stream.rows)).measure(source)
        paper = PaperGauge().bias(profile)
        bounds = [paper.relative_at(c) for c in contexts]
    shares = (curve.estimate, curve.low, curve.high, costs)
    columns = zip(contexts, *(values.tolist() for values in shares), bounds, strict=True)
    # The longest context is the reference for the others: it has no row.
    rows = tuple(Row(losses, *column) for column in columns)[:-1]
    return Diagnosis(
        rows=rows,
        recommendation=recommend(rows, curve, delta),
        curve=curve,
        delta=delta,
        notes=tuple(reading_notes(curve, sums)),
        memory=window_memory(source, losses),
        seconds=time.monotonic() - began,
    )


def _fitting_lags(stream: Stream, lags: int | None, losses: int, burn_in: int) -> int:
    """Return how far back to measure; refuse more lags than the data hold."""
    room = math.inf if stream.length is None else stream.length - burn_in - losses
    if room < 1:
        swapped = stream.length is not None and stream.length < stream.rows
        raise ValueError(
            f"rows of {stream.length} steps are too short for a burn-in of {burn_in} and "
            f"{losses} losses with any context: give longer rows, fewer losses, or less burn-in"
            + (SWAPPED.format(stream.rows) if swapped else "")
        )
    if lags is None:
        return int(min(defaults.LAGS, room))
    if not 1 <= lags <= room:
        raise ValueError(
            f"lags must be in [1, {room}] for rows of {stream.length} steps, a burn-in of "
            f"{burn_in} and {losses} losses, got {lags}"
        )
    return lags
