"""Steps of a stream at which predictions are compared, each with the history before it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from ..data.nest import Nest, State, join_rows, map_leaves, slice_steps
from ..data.segment import Segment
from ..data.stream import Stream
from ..errors import require_whole
from ..model.objective import Objective
from ..model.recurrent import Recurrent
from ..model.running import advance, warm_up

COLUMNS = 64  # end points that run in parallel
STRETCH = 4  # a stretch of a stream is this many times as long as the longest history
CHUNK = 128  # steps in one call of the model: bounds the memory of the features


@dataclass(frozen=True)
class EndPoints:
    """End points beside each other, each in a column of its own.

    Attributes:
        history: `(steps, columns)`; the last step is the end point.
        entering: state that enters the end point after the full history.
        targets: `(1, columns, ...)`; whatever the loss takes if `per_window`.
        per_window: whether a window has one target rather than one for each step.
    """

    history: Segment
    entering: State
    targets: Nest
    per_window: bool = False


def draw_end_points(
    objective: Objective, stream: Stream, longest: int, generator: torch.Generator
) -> Iterator[EndPoints]:
    """Draw random end points of a stream, without end; at each of them some row has a loss.

    The full history goes back to the start of a stretch of the stream, or to the last reset in it.
    The stretch is the whole stream if that is shorter than four times the longest history.
    Otherwise it lies anywhere, and the full history is at least twice the longest one.

    Args:
        objective: model and loss.
        stream: its cursor stays where it is.
        longest: steps of history that every end point has.
        generator: draws stretches, rows and steps.
    """
    most = STRETCH * longest
    stretch = min(steps_in(stream, most), most)
    first = longest if stretch < most else 2 * longest - 1
    misses = 0
    while misses < 100:  # arbitrary, as in `Source.draw`
        segment = stream.random_segment(stretch, generator)
        if segment.rows > COLUMNS:
            rows = torch.randperm(segment.rows, generator=generator)[:COLUMNS]
            segment = segment.of_rows(rows)
        steps = torch.randperm(stretch - first, generator=generator) + first
        scored = (
            step
            for step in steps.tolist()
            if objective.count_losses(slice_steps(segment.targets, step, step + 1)) > 0
        )
        ends = sorted(islice(scored, math.ceil(COLUMNS / segment.rows)))
        misses = 0 if ends else misses + 1
        if ends:
            recurrent = objective.recurrent
            yield _at(recurrent, recurrent.place(segment), ends, longest)
    raise ValueError(
        "a hundred stretches of the stream held no loss: nearly every target is masked"
    )


def _at(recurrent: Recurrent, segment: Segment, ends: list[int], longest: int) -> EndPoints:
    state, states, reached = None, [], 0
    for end in ends:
        state = run(recurrent, segment.between(reached, end), state)
        states.append(state)
        reached = end
    entering = join_rows(states, recurrent.dims(segment.inputs))
    # A history starts from the state that `lookback` is asked about, not from the stream's own.
    later = segment._replace(start=None)
    parts = [later.between(end - longest + 1, end + 1) for end in ends]
    history: Segment = map_leaves(lambda *columns: torch.cat(columns, dim=1), *parts)
    return EndPoints(history, entering, slice_steps(history.targets, -1, None))


def longest_history(room: int, longest: int | None, usual: int) -> int:
    """Return the longest history to try in rows of `room` steps: `usual` unless you say."""
    if room < 2:
        raise ValueError(f"rows of {room} step have no history: give longer ones")
    if longest is None:
        return usual
    require_whole(longest=longest)
    if not 1 <= longest < room:
        raise ValueError(
            f"longest must be in [1, {room - 1}] for rows of {room} steps, got {longest}: the full "
            "history must be longer"
        )
    return longest


def steps_in(stream: Stream, wanted: int) -> int:
    """Return the steps of a stream; of one without a known length those ahead, up to `wanted`."""
    if stream.length is not None:
        return stream.length
    return stream.available(stream.cursor + wanted) - stream.cursor


def run(recurrent: Recurrent, segment: Segment, state: State) -> State:
    """Return the state after a segment of any length; None is the initial state."""
    if not segment.steps:
        return warm_up(recurrent, segment, 0, state)
    for start in range(0, segment.steps, CHUNK):
        part = segment.between(start, min(start + CHUNK, segment.steps))
        state = advance(recurrent, part, state)
    return state
