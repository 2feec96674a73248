"""Did the gradient reach the state? A kernel that drops it would make every K look safe."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..data.nest import map_leaves
from ..data.segment import Segment
from ..estimate.lag_profile import LagProfile
from ..model.objective import CountLosses
from .loss_step import NOT_REACHED


def rows_with_loss(segment: Segment, count_losses: CountLosses) -> NDArray[np.bool_]:
    """Tell which rows have a target at the last step that is not masked."""

    def weight(row: int) -> float:
        return count_losses(map_leaves(lambda x: x[-1:, row : row + 1], segment.targets))

    return np.array([weight(row) > 0 for row in range(segment.rows)])


def alive_rows(
    segment: Segment, count_losses: CountLosses, profile: LagProfile | None
) -> NDArray[np.bool_]:
    """Tell which rows have a loss at the last step and do not start a sequence there.

    For `check_reached`: where a gradient was seen there is nothing to check, and no row is asked.
    """
    if profile is not None and profile.state_norms[1].any():
        return np.ones(segment.rows, dtype=bool)
    if segment.resets is None:
        return rows_with_loss(segment, count_losses)
    return rows_with_loss(segment, count_losses) & ~segment.resets[-1].cpu().numpy()


def check_reached(profile: LagProfile, alive: NDArray[np.bool_]) -> None:
    """Refuse a profile in which no gradient reaches the state that entered the loss's step.

    Args:
        profile: what was measured.
        alive: `(samples,)`, from `alive_rows`.
    """
    if alive.any() and not profile.state_norms[1, alive].any():
        raise ValueError(
            f"{NOT_REACHED}. A kernel that drops the gradient of the state it is handed looks "
            "like this, and would make every truncation length look safe"
        )
