"""What is taken for granted of a model and a loss, looked at once on the data, and warned of."""

from __future__ import annotations

import math
import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .compiled import eager
from .precision import autocast_format, wide
from .state import leaves, map_leaves
from .undisturbed import undisturbed

if TYPE_CHECKING:
    from .backprop import Weigh
    from .model import LossFn, Nest, Recurrent

_LOOK = 8  # arbitrary: steps that tell whether a cut changes what comes out


def warn_of_cuts(recurrent: Recurrent, inputs: Nest) -> None:
    """Warn where the outputs depend on how a sequence is cut, given the state in between.

    A convolution over time or a bidirectional layer in front of the recurrence does that.

    Args:
        recurrent: the model.
        inputs: time first.
    """
    few = map_leaves(lambda x: x[:_LOOK, :1], inputs)
    steps = leaves(few)[0].shape[0]
    if recurrent.cuts_checked or steps < 4:
        return
    recurrent.cuts_checked = True
    with undisturbed(recurrent.module, train=False), torch.no_grad(), eager():
        whole = recurrent.core(few, None)[0]
        first, state = recurrent.core(map_leaves(lambda x: x[: steps // 2], few), None)
        second = recurrent.core(map_leaves(lambda x: x[steps // 2 :], few), state)[0]
    time = recurrent.time_dim
    differences = [
        _relative_difference(x, torch.cat([a, b], time))
        for x, a, b in zip(leaves(whole), leaves(first), leaves(second), strict=True)
        if x.dim() > time and x.shape[time] == steps
    ]
    largest = max(differences, default=0.0)
    if largest > _rounding(recurrent):
        warnings.warn(
            f"the outputs of {recurrent.name} depend on how a sequence is cut, by up to "
            f"{largest:.0%}: it looks along time besides its state, as a convolution or a "
            "bidirectional layer does, and windows cut it. Apply that part to whole sequences, "
            "before the stream",
            UserWarning,
            stacklevel=2,
        )


def warn_of_no_mean(
    recurrent: Recurrent, loss_fn: LossFn, outputs: Any, targets: Nest, weigh: Weigh
) -> None:
    """Warn where a loss is not the mean of those of its two halves, as `weigh` weighs them.

    Looked at for the first loss, the second, the fourth and so on: masks may come late.

    Args:
        recurrent: the model.
        loss_fn: a mean over time and batch, one hopes.
        outputs: of some steps, in the model's layout.
        targets: time first.
        weigh: how many losses some targets hold.
    """
    recurrent.losses_seen += 1
    steps = leaves(targets)[0].shape[0]
    if recurrent.losses_seen.bit_count() != 1 or steps < 2:
        return
    time = recurrent.time_dim
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for module in (recurrent.module, loss_fn):
            if isinstance(module, nn.Module):
                stack.enter_context(undisturbed(module))
        if any(x.dim() <= time or x.shape[time] != steps for x in leaves(outputs)):
            return
        whole, again = (float(recurrent.loss_of(loss_fn, outputs, targets)) for _ in range(2))
        parts = []
        for half in (slice(None, steps // 2), slice(steps // 2, None)):
            some = map_leaves(lambda x, half=half: x[half], targets)
            weight = weigh(some)
            if weight > 0:
                index = (slice(None), half) if time else (half,)
                out = map_leaves(lambda x, index=index: x[index], outputs)
                parts.append((float(recurrent.loss_of(loss_fn, out, some)), weight))
    total = sum(weight for _, weight in parts)
    if whole != again or not math.isfinite(whole) or not total:  # random, or of no use anyway
        return
    mean = sum(value * weight / total for value, weight in parts)
    scale = max(abs(whole), *(abs(value) for value, _ in parts))
    if abs(whole - mean) <= _rounding(recurrent) * scale:
        return
    if len(parts) == 2 and abs(whole - sum(value for value, _ in parts)) <= 1e-3 * scale:
        raise ValueError(
            "the loss is a sum: it must be a mean over time and batch, so that windows of other "
            "lengths weigh the same"
        )
    warnings.warn(
        f"the loss of {steps} steps is {whole:.4g}, the mean of its two halves {mean:.4g}: it is "
        "taken for a mean over steps and rows, and is none. Where targets are masked, weigh= must "
        "count those that are not; what is normalised over a batch is better normalised before "
        "the stream",
        UserWarning,
        stacklevel=2,
    )


def _relative_difference(a: Tensor, b: Tensor) -> float:
    size = wide(a.abs()).max()
    return float((wide((a - b).abs())).max() / size) if size > 0 else 0.0


def _rounding(recurrent: Recurrent) -> float:
    """How far apart equal numbers may be: kernels sum in another order for another length."""
    first = next(recurrent.module.parameters(), None)
    cast = autocast_format(recurrent.device)
    formats = [f for f in (cast, first.dtype if first is not None else None) if f is not None]
    eps = max((torch.finfo(f).eps for f in formats), default=0.0)
    return max(1e-3, 8 * eps)
