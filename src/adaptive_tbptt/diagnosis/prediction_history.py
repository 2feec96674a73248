"""One call: how much history do the predictions of a model need?"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import defaults
from .._torch.compiling import eager
from .._torch.preserve_model import preserve
from ..data.nest import Nest, State
from ..data.stream import Stream
from ..measure.end_points import EndPoints, draw_end_points, longest_history, steps_in
from ..measure.histories import Histories, Predict, check_start
from ..measure.window_batches import as_end_points, read_windows
from ..model.checks import look
from ..model.objective import CountLosses, Objective
from ..model.recurrent import LossFn, Recurrent
from .history_search import MOST, Search
from .lookback_result import Lookback
from .sampling import as_stream

AVERAGED = "The loss after some history is a mean over groups of end points"


def lookback(
    model: nn.Module | Recurrent,
    loss_fn: LossFn,
    data: Stream | tuple[Nest, Nest] | Iterable[Any],
    *,
    tolerance: float = defaults.TOLERANCE,
    longest: int | None = None,
    start: State = None,
    predict: Predict | None = None,
    seconds: float = defaults.SECONDS,
    count_losses: CountLosses | None = None,
    level: float = defaults.LEVEL,
    seed: int = 0,
) -> Lookback:
    """Measure how much history the predictions of a model need.

    A history of h steps means that the model starts from its start state and reads h inputs, the
    present one included. The prediction y_h that it then makes is compared with y, the prediction
    after the full history, at many end points:

        c_h = E |y_h - y|^2 / Var y

    `steps` is the smallest h with c_h at most `tolerance`, for it and for all longer histories
    tried. It is the shortest sequence length; `burn_in`, one less, is the warm-up before the first
    prediction that counts. `loss_steps` is the smallest h with both limits of the loss within
    `tolerance` of the full history's loss. The model runs in eval mode, without dropout and without
    gradients, and is left as it was.

    Args:
        model: any recurrent module.
        loss_fn: `loss_fn(outputs, targets)`, evaluated on the outputs at end points, one step of up
            to 64 rows at a time.
        data: a stream or a pair `(inputs, targets)`, as in `diagnose`: rows are read in order, the
            full history goes back to their start or to the last reset, and end points lie anywhere.
            Or an iterable of such pairs, as a DataLoader yields them: independent windows. The full
            history is then a whole window, and the end point is its last step. Targets may have a
            time axis, or hold one for each window.
        tolerance: the change that you tolerate, as a share of the variance of the predictions, and
            as a share of the loss.
        longest: longest history to try. None is 1024, or half of a shorter stream, or all of a
            window but one step.
        start: state that histories start from, of one row; None is the initial state.
        predict: from the outputs to what should not change, any nest of tensors. None takes the raw
            outputs. If there are several tensors, the one that changes most counts.
        seconds: time limit; at least 8 groups of end points are measured.
        count_losses: as in `AdaptiveTBPTT`, for masked targets: end points without a loss do not
            count.
        level: coverage of the intervals.
        seed: of the end points.

    Choosing a tolerance: 0.01 leaves an error with a tenth of the standard deviation of the
    predictions. Compare `steps` with `loss_steps`. If a model predicts far better than that, its
    loss needs a longer history; if its targets are noisy, a shorter one may do.

    Choosing `predict`: logits may shift by a constant without any effect on the softmax. The raw
    logits count such a shift as a change; `predict=lambda logits: logits.softmax(-1)` does not.

    >>> _ = torch.manual_seed(0)
    >>> data = torch.randn(400, 16, 3), torch.randn(400, 16, 8)
    >>> found = lookback(nn.LSTM(3, 8), nn.functional.mse_loss, data)
    >>> 4 < found.steps < 16, found.burn_in == found.steps - 1
    (True, True)
    """
    began = time.monotonic()
    if not 0.0 < tolerance < 1.0:
        raise ValueError(
            f"tolerance must be in (0, 1), got {tolerance}: 0.01 tolerates a change of 1 % of the "
            "variance of the predictions"
        )
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must be in (0, 1), got {level}")
    objective = Objective.of(model, loss_fn, count_losses)
    generator = torch.Generator().manual_seed(seed)
    # Data are read inside as well: a DataLoader that shuffles draws from torch's random state.
    with preserve(*objective.modules, train=False), torch.no_grad(), eager():
        drawn = _draw(objective, data, longest, generator)
        probe = Histories(objective, check_start(objective.recurrent, start, drawn.inputs), predict)
        search = Search(drawn.longest, tolerance, level, drawn.most)
        curve = search.run(probe, drawn.groups, seconds - (time.monotonic() - began))
    return Lookback.of(curve, tolerance, window=drawn.window, seconds=time.monotonic() - began)


class _Drawn(NamedTuple):
    """End points of the data: how many groups, some of their inputs, and what fits into them."""

    groups: Iterator[EndPoints]
    most: int
    inputs: Nest
    longest: int
    window: int | None


def _draw(
    objective: Objective, data: Any, longest: int | None, generator: torch.Generator
) -> _Drawn:
    """Draw end points of a stream, or of independent windows; check model and loss on some."""
    recurrent = objective.recurrent
    batches = _windows_in(data)
    if batches is None:
        stream = as_stream(data, recurrent)
        room = steps_in(stream, 2 * defaults.HISTORY if longest is None else longest + 1)
        longest = longest_history(room, longest, min(defaults.HISTORY, room // 2))
        some = stream.peek(64)
        look(objective, some, stream, mean=AVERAGED)
        groups = draw_end_points(objective, stream, longest, generator)
        return _Drawn(groups, MOST, some.inputs, longest, None)
    parts = read_windows(batches, recurrent, MOST, generator)
    some, window = parts[0].segment, max(part.segment.steps for part in parts)
    longest = longest_history(window, longest, window - 1)
    if parts[0].targets is None:
        look(objective, some, mean=AVERAGED)
    groups = (as_end_points(recurrent, part) for part in parts)
    return _Drawn(groups, max(len(parts), MOST), some.inputs, longest, window)


def _windows_in(data: Any) -> Iterable[Any] | None:
    """Return batches of independent windows; None for a stream, or for a pair of tensors."""
    pair = isinstance(data, list) and data and isinstance(data[0], Tensor)
    if pair or isinstance(data, Stream | tuple | Tensor) or not isinstance(data, Iterable):
        return None
    return data
