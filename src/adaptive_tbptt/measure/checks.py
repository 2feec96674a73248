"""Detect what makes a measurement wrong: dropped gradients, and rows that depend on each other."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .._torch.number_formats import autocast_format, wide
from .._torch.preserve_model import random_state_of, restore_random_state
from ..data.nest import Nest, State, leaves, map_leaves, rows_of, slice_steps
from ..data.segment import Segment
from ..estimate.lag_profile import LagProfile
from ..model.objective import CountLosses
from ..model.recurrent import Recurrent
from ..model.running import unroll

NOT_REACHED = (
    "no gradient reaches the state: the loss does not depend on the state that entered its step"
)


def refuse_batch_norm(module: nn.Module) -> None:
    """Refuse batch normalisation that takes its statistics from the rows of a measurement."""
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training:
            raise ValueError(
                f"'{name}' is batch normalisation in training mode: it makes the rows depend on "
                "each other. Measure in eval mode, or normalise otherwise (LayerNorm)"
            )


def alive_rows(
    segment: Segment, count_losses: CountLosses, profile: LagProfile | None
) -> NDArray[np.bool_]:
    """Return which rows have a loss at the last step and do not start a sequence there.

    If the profile has a gradient, `check_reached` has nothing to check: all rows count.
    """
    if profile is not None and profile.state_norms[1].any():
        return np.ones(segment.rows, dtype=bool)

    alive = rows_with_loss(slice_steps(segment.targets, -1, None), count_losses)
    return alive if segment.resets is None else alive & ~segment.resets[-1].cpu().numpy()


def rows_with_loss(targets: Nest, count_losses: CountLosses) -> NDArray[np.bool_]:
    """Return which rows have a loss among time-first targets."""

    def has_loss(row: int) -> bool:
        return count_losses(map_leaves(lambda x: x[:, row : row + 1], targets)) > 0

    return np.array([has_loss(row) for row in range(rows_of(targets))])


def check_reached(profile: LagProfile, alive: NDArray[np.bool_]) -> None:
    """Refuse a profile in which no gradient reaches the state that entered the loss's step.

    Args:
        profile: the measurement.
        alive: `(samples,)`, from `alive_rows`.
    """
    if alive.any() and not profile.state_norms[1, alive].any():
        raise ValueError(
            f"{NOT_REACHED}. A kernel that drops the gradient of the state passed to it has this "
            "effect, and would make every truncation length look safe"
        )


_SHIFT = 0.1  # arbitrary: well above rounding, and below one step of a counter


def warn_of_dropped_gradients(
    recurrent: Recurrent, profile: LagProfile, step: Segment, state: State
) -> None:
    """Warn if a kernel drops the gradient of one of its states, say of c but not of h.

    A part without any gradient is suspicious only if shifting it changes what the step returns;
    shifting a counter does not. This only warns, because a part may be detached on purpose.
    `check_reached` handles the case that no part has a gradient.

    Args:
        recurrent: the model.
        profile: the measurement.
        step: the step that carries the loss.
        state: the state that enters it.
    """
    norms = profile.component_norms
    unreached = [name for name, values in norms.items() if not values[1:].any()]
    if not unreached or len(unreached) == len(norms):
        return
    random = random_state_of(recurrent.module)

    def returned(moved: str | None) -> list[Tensor]:
        restore_random_state(recurrent.module, random)
        entering = map_leaves(lambda x: x.detach().contiguous().clone(), state)
        if moved is not None:
            recurrent.components(entering)[moved].add_(_SHIFT)
        (last,) = unroll(recurrent, step.inputs, entering, step.resets)
        parts = recurrent.components(last.leaving)
        reached = [part for name, part in parts.items() if name not in unreached]
        return [x for x in (*leaves(last.features), *reached) if x.is_floating_point()]

    with torch.no_grad():
        before = returned(None)
        for name in unreached:
            if any(map(_differ, before, returned(name))):
                warnings.warn(
                    f"part '{name}' of the state changes what the model returns, but no gradient "
                    "reaches it at any lag. If a kernel drops it, what flows through this part is "
                    "missing from the gradient and from K. If you detach it on purpose, all is "
                    "well",
                    UserWarning,
                    stacklevel=4,
                )


def _differ(a: Tensor, b: Tensor) -> bool:
    """Whether two results differ by more than rounding; 1e-4 is arbitrary."""
    eps = max(torch.finfo(f).eps for f in (a.dtype, autocast_format(a.device) or a.dtype))
    change, size = (wide(a) - wide(b)).abs().max(), wide(a).abs().max()
    return bool(change > max(4 * eps, 1e-4) * size)
