"""Check on data what the library assumes of a model and a loss.

A training loop checks once, on its first steps; `check` runs at several places of a stream.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.compiling import eager
from .._torch.number_formats import autocast_format, wide
from .._torch.preserve_model import preserve
from ..data.nest import Nest, leaves, map_leaves, slice_steps, steps_of, swap_time_and_batch
from ..data.segment import Segment
from ..data.stream import SequenceStream, Stream
from .finding import Finding
from .objective import CountLosses, Objective
from .recurrent import LossFn, Recurrent
from .running import run_pieces
from .state_checks import calls_remember, state_drops_gradients, state_hides_tensors

CUT_STEPS = 8  # arbitrary: enough steps to see whether a cut changes the outputs
ROUNDING = 1e-3  # relative; arbitrary: above float32's, below what a wrong model would show
ELSEWHERE = (
    "Windows do not need one; an evaluation in chunks, a measurement of single steps and several "
    "processes do"
)
SINGLE_STEPS = (
    "The gradient of a single step is then not what you train with: pass losses=, the number of "
    "steps of your window"
)
PLACES = 3  # where `check` runs: the start, middle and end of a stream


def check(
    model: nn.Module | Recurrent,
    loss_fn: LossFn,
    data: Stream | tuple[Nest, Nest],
    *,
    steps: int = 64,
    count_losses: CountLosses | None = None,
    batch_first: bool | None = None,
    state_batch_dim: int | None = None,
) -> list[Finding]:
    """Check on data what the library assumes of a model and a loss; return all findings.

    Args:
        model: any recurrent module.
        loss_fn: `loss_fn(outputs, targets)`.
        data: a stream, or a pair `(inputs, targets)` laid out as the model takes it.
        steps: steps checked at each of three places: start, middle and end of the data.
        count_losses: as in `AdaptiveTBPTT`.
        batch_first: as in `AdaptiveTBPTT`.
        state_batch_dim: as in `AdaptiveTBPTT`.

    >>> x, y = torch.randn(100, 4, 3), torch.randn(100, 4, 8)
    >>> check(nn.GRU(3, 8), nn.MSELoss(), (x, y))
    []
    >>> total = lambda outputs, targets: (outputs - targets).square().sum()
    >>> print(*check(nn.GRU(3, 8), total, (x, y)))
    loss_fn returns a sum over steps: divide it by their number, so that windows of any length
    weigh the same
    """
    objective = Objective.of(
        model, loss_fn, count_losses, batch_first=batch_first, state_batch_dim=state_batch_dim
    )
    if not isinstance(data, Stream):
        data = SequenceStream(*data, batch_first=objective.recurrent.batch_first)
    first = data.cursor
    stop = data.available(first + steps) if data.length is None else data.length
    found = {one.message: one for one in _axes(objective.recurrent, data)}
    for place in range(PLACES):
        start = first + (stop - first - min(steps, stop - first)) * place // (PLACES - 1)
        segment = data.segment(start, min(start + steps, stop))
        for one in _findings(objective, segment, ELSEWHERE, silent=False):
            found.setdefault(one.message, one)
    return list(found.values())


def look(
    objective: Objective,
    segment: Segment,
    stream: Stream | None = None,
    *,
    mean: str | None = None,
) -> None:
    """Check the first steps of a loop: raise if training would be wrong, warn of the rest.

    Args:
        objective: model and loss.
        segment: the first steps.
        stream: where they come from, to check its axes.
        mean: why the caller needs a mean over time and batch; None if it does not.
    """
    axes = [] if stream is None else _axes(objective.recurrent, stream)
    for finding in [*axes, *_findings(objective, segment, mean, silent=True)]:
        if finding.fatal:
            raise ValueError(finding.message)
        warnings.warn(finding.message, UserWarning, stacklevel=4)


def refuse_single_losses(objective: Objective, segment: Segment) -> None:
    """Refuse to measure single steps if `loss_fn` is not a mean over time."""
    finding = _loss_is_no_mean(objective, segment, SINGLE_STEPS)
    if finding is not None:
        raise ValueError(finding.message)


@contextmanager
def _trial(*modules: nn.Module, train: bool | None = False) -> Iterator[None]:
    with preserve(*modules, train=train), torch.no_grad(), eager():
        yield


def _axes(recurrent: Recurrent, stream: Stream) -> list[Finding]:
    """Suspect swapped axes if there are far fewer steps than rows."""
    steps, rows = stream.length, stream.rows
    if steps is None or not (4 * steps <= rows or (recurrent.batch_first and steps < rows)):
        return []
    return [
        Finding(
            f"the stream has {steps} steps of {rows} rows. Its first dimension is time: if your "
            f"data are (batch, time, ...), {steps} rows of {rows} steps, pass batch_first=True to "
            "SequenceStream"
        )
    ]


def _findings(
    objective: Objective, segment: Segment, mean: str | None, *, silent: bool
) -> list[Finding]:
    def loss_is_no_mean(objective: Objective, segment: Segment) -> Finding | None:
        finding = _loss_is_no_mean(objective, segment, mean or "")
        return finding if finding is not None and (mean or finding.fatal) else None

    checks: tuple[Callable[[Objective, Segment], Finding | None], ...] = (
        state_hides_tensors,
        calls_remember,
        state_drops_gradients,
        _forward_is_head_of_core,
        _outputs_depend_on_cuts,
        loss_is_no_mean,
        _last_step_is_not_scored,
    )
    found = []
    for one in checks:
        try:
            finding = one(objective, segment)
        except Exception as error:  # advisory: the training pass itself reports what is wrong
            finding = (
                None if silent else Finding(f"{one.__name__.lstrip('_')} was not checked: {error}")
            )
        if finding is not None:
            found.append(finding)
    return found


def _forward_is_head_of_core(objective: Objective, segment: Segment) -> Finding | None:
    """Compare `forward` with `head(core(...))`, which runs in its place."""
    recurrent = objective.recurrent
    if not recurrent.splits or type(recurrent.module).forward is nn.Module.forward:
        return None
    inputs = recurrent.place(segment.between(0, CUT_STEPS).inputs)
    own = swap_time_and_batch(inputs) if recurrent.batch_first else inputs
    with _trial(recurrent.module):
        ours = recurrent.head(recurrent.core(inputs, None)[0])
        try:
            theirs = recurrent.module(own, None)
        except (TypeError, AttributeError, NotImplementedError):
            return None  # the library never calls a forward of another signature
    theirs = theirs[0] if isinstance(theirs, tuple) and len(theirs) == 2 else theirs
    if all(
        a.shape == b.shape and _relative_difference(a, b) <= _rounding(recurrent, a.dtype)
        for a, b in zip(leaves(ours), leaves(theirs), strict=True)
    ):
        return None
    return Finding(
        f"{recurrent.name} has methods named core and head, so its forward is never called, but "
        "forward(x, state) does not equal head(core(x, state)): training would skip what else "
        "forward does. Move that into core or head, or give the two methods other names",
        fatal=True,
    )


def _outputs_depend_on_cuts(objective: Objective, segment: Segment) -> Finding | None:
    """Compare a sequence run whole with one run in two halves that hand over the state.

    A convolution over time or a bidirectional layer in front of the recurrence makes them differ.
    """
    recurrent = objective.recurrent
    inputs = recurrent.place(segment.between(0, CUT_STEPS).inputs)
    steps, rows = leaves(inputs)[0].shape[:2]
    if steps < 4:
        return None
    middle, largest = steps // 2, 0.0
    with _trial(recurrent.module):
        whole, again = (recurrent.core(inputs, None)[0] for _ in range(2))
        first, state = recurrent.core(slice_steps(inputs, 0, middle), None)
        second, _ = recurrent.core(slice_steps(inputs, middle, None), state)
    for x, same, a, b in zip(*map(leaves, (whole, again, first, second)), strict=True):
        parts = ((x, steps), (a, middle), (b, steps - middle))
        known = all(recurrent.is_laid_out(part, length, rows) for part, length in parts)
        if known and (x.is_floating_point() or x.is_complex()) and torch.equal(x, same):
            change = _relative_difference(x, torch.cat([a, b], recurrent.time_dim))
            if change > _rounding(recurrent, x.dtype):
                largest = max(largest, change)
    if not largest:
        return None
    return Finding(
        f"the outputs of {recurrent.name} depend on how a sequence is cut, by up to {largest:.0%}: "
        "a part of it, such as a convolution or a bidirectional layer, reads across steps, and "
        "windows cut that. Apply such a part to whole sequences, before the stream"
    )


def _loss_is_no_mean(objective: Objective, segment: Segment, why: str) -> Finding | None:
    """Compare the loss with the mean of the losses of two halves, weighted by `count_losses`.

    A window calls the loss once and needs no mean. `why` says who does.
    """
    recurrent, steps = objective.recurrent, segment.steps
    if steps < 2:
        return None
    with _trial(*objective.modules, train=None):
        (*_, piece) = run_pieces(recurrent, segment._replace(resets=None), None)
        outputs = recurrent.head(piece.features)
        if not all(recurrent.is_laid_out(x, steps, segment.rows) for x in leaves(outputs)):
            return None
        placed = recurrent.place(segment.targets)
        again, loss = (objective.loss_of(outputs, placed) for _ in range(2))
        parts = list(_halves(objective, outputs, segment.targets, placed))
    whole = float(loss)
    total = sum(count for _, count in parts)
    if again != loss or not math.isfinite(whole) or not total:  # random, or nothing to compare
        return None
    mean = sum(value * count / total for value, count in parts)
    sizes = [abs(value) for value, _ in parts]
    scale = max(abs(whole), *sizes)
    if abs(whole - mean) <= _rounding(recurrent, loss.dtype) * scale:
        return None
    both = len(parts) == 2 and min(sizes) > 1e-2 * scale  # a half without targets adds nothing
    if both and abs(whole - sum(value for value, _ in parts)) <= 1e-3 * scale:
        return Finding(
            "loss_fn returns a sum over steps: divide it by their number, so that windows of any "
            "length weigh the same",
            fatal=True,
        )
    return Finding(
        f"loss_fn does not behave like a mean over time and batch: {steps} steps give {whole:.4g}, "
        f"the mean of their two halves is {mean:.4g}. {why}. If targets are masked, count_losses= "
        "must count the unmasked ones"
    )


def _last_step_is_not_scored(objective: Objective, segment: Segment) -> Finding | None:
    """Change the inputs of the last step: a loss that stays the same does not score that step.

    A model that shifts its labels inside (as many language models do) predicts the step after each
    one, so a window of n steps has n - 1 losses. The step before the last is the control: if
    changing that one has no effect either, the loss is too insensitive to tell.
    """
    recurrent, steps = objective.recurrent, 4  # few, so that a single one shows in their mean
    if segment.steps < steps:
        return None
    segment = segment.between(segment.steps - steps, segment.steps)
    if objective.count_losses(segment.between(3, 4).targets) == 0:
        return None

    def loss(replaced: int) -> Tensor:
        """Replace the inputs of one step by those of the first; 0 changes nothing."""
        order = [0 if step == replaced else step for step in range(steps)]
        inputs = map_leaves(lambda x: x[order], segment.inputs)
        part = Segment(inputs, segment.targets)
        return objective.loss_of_pieces(list(run_pieces(recurrent, part, None)), part.targets)

    with _trial(*objective.modules):
        before, again, control, after = (loss(step) for step in (0, 0, steps - 2, steps - 1))
    if _rounding(recurrent, before.dtype) > ROUNDING:  # one step of many may be lost in it
        return None
    if before != again or control == before or after != before:
        return None
    return Finding(
        "the loss does not depend on the inputs of a window's last step, so every window loses "
        "one loss. If the model shifts its labels inside, shift the targets in the stream instead"
    )


def _halves(
    objective: Objective, outputs: Any, targets: Nest, placed: Nest
) -> Iterator[tuple[float, float]]:
    """Yield loss and count of each half that has losses; `placed` are the targets on the device."""
    middle = steps_of(targets) // 2
    for half in (slice(None, middle), slice(middle, None)):
        count = objective.count_losses(map_leaves(lambda x, half=half: x[half], targets))
        if count > 0:
            index = (slice(None), half) if objective.recurrent.batch_first else (half,)
            out = map_leaves(lambda x, index=index: x[index], outputs)
            some = map_leaves(lambda x, half=half: x[half], placed)
            yield float(objective.loss_of(out, some)), count


def _relative_difference(a: Tensor, b: Tensor) -> float:
    size = wide(a.abs()).max()
    return float((wide((a - b).abs())).max() / size) if size > 0 else 0.0


def _rounding(recurrent: Recurrent, number: torch.dtype) -> float:
    """Return the tolerated rounding: kernels sum in another order for another length."""
    first = next(recurrent.module.parameters(), None)
    cast = autocast_format(recurrent.device)
    formats = [f for f in (number, cast, None if first is None else first.dtype) if f is not None]
    eps = max(torch.finfo(f).eps for f in formats if f.is_floating_point or f.is_complex)
    return max(ROUNDING, 8 * eps)
