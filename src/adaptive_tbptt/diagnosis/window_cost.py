"""What a window with context costs, timed on the model itself."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from .._torch.preserve_model import measuring
from ..data.nest import State
from ..data.stream import Segment
from ..loop.window_pass import window_forward
from ..measure.sampling import Source, trained_parameters
from ..model.objective import Objective
from ..model.running import advance, warm_up

TURNS = 5  # of each contender; the fastest counts, the others were disturbed


def window_costs(source: Source, losses: int, contexts: Sequence[int]) -> NDArray[np.float64]:
    """Return the time of a forward and backward pass for every context, relative to context 0.

    A few contexts are timed in turn on one segment; the cost of those in between is interpolated,
    since every step of context costs the same.

    Args:
        source: model, loss and data.
        losses: K2.
        contexts: ascending from 0.
    """
    objective, longest = source.objective, contexts[-1]
    timed = sorted({0, min(1, longest), contexts[len(contexts) // 2], longest})
    with measuring(objective.modules, source.train):
        segment = objective.recurrent.place(source.draw(longest + losses, losses))
        state = warm_up(objective.recurrent, segment, source.burn_in)
        segment = segment.between(source.burn_in, segment.steps)
        starts = {c: _start(objective, segment, state, longest - c) for c in timed}
        best = dict.fromkeys(timed, float("inf"))
        for turn in range(TURNS + 1):
            for context in timed:
                seconds = _time(objective, *starts[context], context)
                if turn:  # the first warms up
                    best[context] = min(best[context], seconds)
    times = np.maximum.accumulate([best[c] for c in timed])
    return np.asarray(np.interp(contexts, timed, times / times[0]))


def _start(
    objective: Objective, segment: Segment, state: State, skipped: int
) -> tuple[Segment, State]:
    """Return the window that is left after some steps, and the state that enters it."""
    if skipped:
        state = advance(objective.recurrent, segment.between(0, skipped), state)
    return segment.between(skipped, segment.steps), state


def _time(objective: Objective, window: Segment, state: State, context: int) -> float:
    parameters = list(trained_parameters(objective).values())
    # On a CPU what other processes do should not count; an accelerator runs beside the process.
    on_cpu = objective.recurrent.device.type == "cpu"
    clock = time.process_time if on_cpu else time.perf_counter
    _wait(objective)
    began = clock()
    loss = window_forward(objective, window, state, context).loss
    torch.autograd.grad(loss, parameters, allow_unused=True)
    _wait(objective)
    return clock() - began


def _wait(objective: Objective) -> None:
    """Let an accelerator finish what it was given."""
    device = objective.recurrent.device
    if device.type != "cpu":
        module = torch.get_device_module(device)
        if hasattr(module, "synchronize"):
            module.synchronize()
