"""Independent windows as end points: the last step of each, with the whole window before it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..data.nest import Nest, leaves, map_leaves, slice_steps
from ..data.segment import Segment, time_first
from ..model.recurrent import Recurrent
from .end_points import COLUMNS, EndPoints, run

FEWEST = 8  # arbitrary: intervals from fewer windows say nothing


class Windows(NamedTuple):
    """Windows of equal length.

    Attributes:
        segment: `(steps, windows)`; its targets are the inputs if a window has one target.
        targets: `(windows, ...)`, one for each window; None if every step has one.
    """

    segment: Segment
    targets: Nest | None


def read_windows(
    source: Iterable[Any], recurrent: Recurrent, groups: int, generator: torch.Generator
) -> list[Windows]:
    """Read batches of windows, and deal their windows out at random to independent groups.

    Args:
        source: yields `(inputs, targets)` laid out as the model takes them; the targets have a time
            axis, or one target for each window.
        recurrent: the model.
        groups: groups to make, of at most `COLUMNS` windows; more if windows differ in length.
        generator: chooses the windows.
    """
    limit, total = groups * COLUMNS, 0
    pools: dict[tuple[int, bool], list[Windows]] = {}
    for batch in source:
        windows = _windows_of(batch, recurrent.batch_first)
        chosen = torch.randperm(windows.segment.rows, generator=generator)[: limit - total]
        key = windows.segment.steps, windows.targets is None
        pools.setdefault(key, []).append(_take(windows, chosen))
        total += len(chosen)
        if total == limit:
            break
    if total < FEWEST:
        raise ValueError(f"intervals need at least {FEWEST} windows, got {total}: give more data")
    size = math.ceil(total / groups)
    found = []
    for parts in pools.values():
        pool = _join(parts)
        order = torch.randperm(pool.segment.rows, generator=generator)
        found += [_take(pool, index) for index in order.split(size)]
    order = torch.randperm(len(found), generator=generator)
    return [found[i] for i in order.tolist()]


def as_end_points(recurrent: Recurrent, windows: Windows) -> EndPoints:
    """Run whole windows; their last steps are the end points."""
    segment: Segment = recurrent.place(windows.segment)
    entering = run(recurrent, segment.between(0, segment.steps - 1), None)
    if windows.targets is None:
        return EndPoints(segment, entering, slice_steps(segment.targets, -1, None))
    return EndPoints(segment, entering, recurrent.place(windows.targets), per_window=True)


def _windows_of(batch: Any, batch_first: bool) -> Windows:
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        raise TypeError(
            "every batch of windows must be (inputs, targets) or (inputs, targets, resets), got "
            f"{type(batch).__name__}. If a loader yields something else, pass map(as_pair, loader) "
            "with a function of yours"
        )
    inputs, targets, *rest = batch
    segment = time_first(inputs, inputs, *rest, batch_first=batch_first)
    if segment.steps < 2:
        raise ValueError(
            "a window of 1 step has no history. Windows are "
            f"{'(batch, time, ...)' if batch_first else '(time, batch, ...)'}, as the model takes "
            f"them; the inputs have shape {tuple(leaves(inputs)[0].shape)}"
        )
    rows = segment.rows
    if all(leaf.shape[:2] == leaves(inputs)[0].shape[:2] for leaf in leaves(targets)):
        return Windows(time_first(inputs, targets, *rest, batch_first=batch_first), None)
    for leaf in leaves(targets):
        if leaf.shape[:1] != (rows,):
            raise ValueError(
                f"targets of shape {tuple(leaf.shape)} fit neither every step of the inputs, "
                f"{tuple(leaves(inputs)[0].shape[:2])}, nor each of the {rows} windows"
            )
    return Windows(segment, targets)


def _take(windows: Windows, index: torch.Tensor) -> Windows:
    segment = map_leaves(lambda leaf: leaf[:, index.to(leaf.device)], windows.segment)
    return Windows(segment, map_leaves(lambda leaf: leaf[index.to(leaf.device)], windows.targets))


def _join(parts: list[Windows]) -> Windows:
    segment = map_leaves(lambda *leaf: torch.cat(leaf, dim=1), *(part.segment for part in parts))
    targets = map_leaves(lambda *leaf: torch.cat(leaf), *(part.targets for part in parts))
    return Windows(segment, targets)
