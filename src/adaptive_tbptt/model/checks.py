"""What is taken for granted of a model and a loss, looked at once on the data, and warned of."""

from __future__ import annotations

import math
import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._torch.compiling import eager
from .._torch.number_formats import autocast_format, wide
from .._torch.preserve_model import preserve
from ..data.nest import leaves, map_leaves

if TYPE_CHECKING:
    from ..data.nest import Nest
    from .losses import CountLosses
    from .recurrent import LossFn, Recurrent


_LOOK = 8  # arbitrary: steps that tell whether a cut changes what comes out


def warn_of_cuts(recurrent: Recurrent, inputs: Nest) -> None:
    """Warn where the outputs depend on how a sequence is cut, given the state in between.

    A convolution over time or a bidirectional layer in front of the recurrence does that.

    Args:
        recurrent: the model.
        inputs: time first.
    """
    if recurrent.cuts_checked or leaves(inputs)[0].shape[0] < 4:
        return
    recurrent.cuts_checked = True
    try:
        largest = _change_by_a_cut(recurrent, map_leaves(lambda x: x[:_LOOK], inputs))
    except Exception:  # who may not be called so is not to be stopped by a look
        return
    if largest:
        warnings.warn(
            f"the outputs of {recurrent.name} depend on how a sequence is cut, by up to "
            f"{largest:.0%}: it looks along time besides its state, as a convolution or a "
            "bidirectional layer does, and windows cut it. Apply that part to whole sequences, "
            "before the stream",
            UserWarning,
            stacklevel=2,
        )


def _change_by_a_cut(recurrent: Recurrent, inputs: Nest) -> float:
    """Return the largest relative change of the outputs that is more than rounding."""
    steps, rows = leaves(inputs)[0].shape[:2]
    middle = steps // 2
    with preserve(recurrent.module, train=False), torch.no_grad(), eager():
        whole, again = (recurrent.core(inputs, None)[0] for _ in range(2))
        first, state = recurrent.core(map_leaves(lambda x: x[:middle], inputs), None)
        second, _ = recurrent.core(map_leaves(lambda x: x[middle:], inputs), state)
    largest = 0.0
    for x, same, a, b in zip(*map(leaves, (whole, again, first, second)), strict=True):
        parts = ((x, steps), (a, middle), (b, steps - middle))
        known = all(recurrent.is_laid_out(part, length, rows) for part, length in parts)
        if known and (x.is_floating_point() or x.is_complex()) and torch.equal(x, same):
            change = _relative_difference(x, torch.cat([a, b], recurrent.time_dim))
            if change > _rounding(recurrent, x.dtype):
                largest = max(largest, change)
    return largest


def warn_of_no_mean(
    recurrent: Recurrent, loss_fn: LossFn, outputs: Any, targets: Nest, count_losses: CountLosses
) -> None:
    """Warn where a loss is not the mean of those of its two halves, as `count_losses` weighs them.

    Looked at for the first loss, the second, the fourth and so on: masks may come late.

    Args:
        recurrent: the model.
        loss_fn: a mean over time and batch, one hopes.
        outputs: of some steps, in the model's layout.
        targets: time first, on any device.
        count_losses: how many losses some targets hold.
    """
    recurrent.losses_seen += 1
    steps, rows = leaves(targets)[0].shape[:2]
    if recurrent.losses_seen.bit_count() != 1 or steps < 2:
        return
    if not all(recurrent.is_laid_out(x, steps, rows) for x in leaves(outputs)):
        return
    try:
        whole, again, parts, number = _halves(recurrent, loss_fn, outputs, targets, count_losses)
    except Exception:  # who may not be called so is not to be stopped by a look
        return
    total = sum(weight for _, weight in parts)
    if whole != again or not math.isfinite(whole) or not total:  # random, or of no use anyway
        return
    mean = sum(value * weight / total for value, weight in parts)
    sizes = [abs(value) for value, _ in parts]
    scale = max(abs(whole), *sizes)
    if abs(whole - mean) <= _rounding(recurrent, number) * scale:
        return
    both = len(parts) == 2 and min(sizes) > 1e-2 * scale  # a half without targets adds nothing
    if both and abs(whole - sum(value for value, _ in parts)) <= 1e-3 * scale:
        raise ValueError(
            "the loss is a sum: it must be a mean over time and batch, so that windows of other "
            "lengths weigh the same"
        )
    warnings.warn(
        f"the loss of {steps} steps is {whole:.4g}, the mean of its two halves {mean:.4g}: it is "
        "taken for a mean over steps and rows, and is none. Where targets are masked, "
        "count_losses= must count those that are not; what is normalised over a batch is better normalised before "
        "the stream",
        UserWarning,
        stacklevel=2,
    )


def _halves(
    recurrent: Recurrent, loss_fn: LossFn, outputs: Any, targets: Nest, count_losses: CountLosses
) -> tuple[float, float, list[tuple[float, float]], torch.dtype]:
    """Return the loss, the loss again, loss and weight of each half, and the number format."""
    middle = leaves(targets)[0].shape[0] // 2
    placed = recurrent.place(targets)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(eager())
        for module in (recurrent.module, loss_fn):
            if isinstance(module, nn.Module):
                stack.enter_context(preserve(module))
        whole, again = (recurrent.loss_of(loss_fn, outputs, placed) for _ in range(2))
        parts = []
        for half in (slice(None, middle), slice(middle, None)):
            weight = count_losses(map_leaves(lambda x, half=half: x[half], targets))
            if weight > 0:
                index = (slice(None), half) if recurrent.batch_first else (half,)
                out = map_leaves(lambda x, index=index: x[index], outputs)
                some = map_leaves(lambda x, half=half: x[half], placed)
                parts.append((float(recurrent.loss_of(loss_fn, out, some)), weight))
    return float(whole), float(again), parts, whole.dtype


def _relative_difference(a: Tensor, b: Tensor) -> float:
    size = wide(a.abs()).max()
    return float((wide((a - b).abs())).max() / size) if size > 0 else 0.0


def _rounding(recurrent: Recurrent, number: torch.dtype) -> float:
    """How far apart equal numbers may be: kernels sum in another order for another length."""
    first = next(recurrent.module.parameters(), None)
    cast = autocast_format(recurrent.device)
    formats = [f for f in (number, cast, None if first is None else first.dtype) if f is not None]
    eps = max(torch.finfo(f).eps for f in formats if f.is_floating_point or f.is_complex)
    return max(1e-3, 8 * eps)
