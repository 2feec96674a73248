"""Cut one long series into rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .reading import as_tensor
from .segment import check_finite


def cut_series(
    series: Any, targets: Any, rows: int, horizon: int | None
) -> list[tuple[Tensor, Tensor]]:
    """Cut a series and its targets into `rows` sequences whose lengths differ by at most one.

    Args:
        series: `(time,)` or `(time, features)`.
        targets: of the same steps; None for the series itself.
        rows: number of sequences.
        horizon: the target of step t is that of step t + horizon.
    """
    inputs = _columns(series, "series")
    check_finite(inputs, "the values of the series")
    wanted = inputs if targets is None else _columns(targets, "targets")
    ahead = int(targets is None) if horizon is None else horizon
    if len(wanted) != len(inputs):
        raise ValueError(
            f"targets have shape {tuple(wanted.shape)}: expected {len(inputs)} steps along the "
            f"first axis, time, as in the series {tuple(inputs.shape)}"
        )
    if ahead < int(targets is None):
        raise ValueError(
            f"horizon must be at least {int(targets is None)}, got {ahead}: it is how many steps "
            "ahead the targets lie"
        )
    steps = len(inputs) - ahead
    if not 1 <= rows <= steps:
        raise ValueError(
            f"rows must be in [1, {max(steps, 0)}] for a series of {len(inputs)} steps and a "
            f"horizon of {ahead}, got {rows}"
        )
    # The first rows take what is left over, so that packing, longest first, keeps their order.
    edges = [row * (steps // rows) + min(row, steps % rows) for row in range(rows + 1)]
    return [(inputs[a:b], wanted[a + ahead : b + ahead]) for a, b in pairwise(edges)]


def _columns(given: Any, name: str) -> Tensor:
    """Return `(time, features)`; integers of a tensor stay `(time,)`, as they may be tokens."""
    values = as_tensor(given, name)
    if values.dim() not in (1, 2):
        raise ValueError(
            f"{name} have shape {tuple(values.shape)}: expected (time,) or (time, features). If "
            "they have a batch axis, use SequenceStream(inputs, targets)"
        )
    if isinstance(given, Tensor) and not values.is_floating_point():
        return values
    if name == "series" and not values.is_floating_point():
        values = values.to(torch.get_default_dtype())
    return values[:, None] if values.dim() == 1 and values.is_floating_point() else values
