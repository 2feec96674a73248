"""Detect what makes a measurement wrong: dropped gradients, and rows that depend on each other."""

from __future__ import annotations

import warnings
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ..data.nest import Nest, map_leaves, rows_of, slice_steps
from ..data.segment import Segment
from ..estimate.lag_profile import LagProfile
from ..model.objective import CountLosses, Objective
from ..model.state_checks import state_drops_gradients

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
            f"{NOT_REACHED}. If the readout starts at zero, train a few steps first. Or a kernel "
            "drops the gradient of the state passed to it: then every truncation length would "
            "look safe"
        )


def warn_of_dropped_gradients(objective: Objective, segment: Segment) -> None:
    """Warn if the model drops the gradient of a part of its state; a loop checks that itself."""
    finding = None
    with suppress(Exception):  # advisory: the measurement itself reports what is wrong
        finding = state_drops_gradients(objective, segment)
    if finding is not None:
        warnings.warn(finding.message, UserWarning, stacklevel=3)
