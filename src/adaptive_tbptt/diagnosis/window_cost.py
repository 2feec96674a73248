"""The cost of a window with context, timed on the model itself."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from .._torch.preserve_model import measuring
from ..data.nest import State
from ..data.segment import Segment
from ..loop.window_pass import window_forward
from ..measure.sampling import Source, trained_parameters
from ..model.objective import Objective
from ..model.running import warm_up

TURNS = 3  # of each contender, at least; the fastest counts, the others were disturbed
SECONDS = 0.3  # arbitrary: small models take more turns, since a disturbance outlasts three of them


def window_costs(source: Source, losses: int, contexts: Sequence[int]) -> NDArray[np.float64]:
    """Return the time of a forward and backward pass for every context, relative to context 0.

    A few contexts are timed in turn on one segment. The others are interpolated, since every step
    of context costs the same.

    Args:
        source: model, loss and data.
        losses: K2.
        contexts: ascending from 0.
    """
    objective, longest = source.objective, contexts[-1]
    timed = sorted({0, min(1, longest), contexts[len(contexts) // 2], longest})
    with measuring(objective.modules, source.train):
        segment = objective.recurrent.place(source.draw(longest + losses, losses))
        best = dict.fromkeys(timed, float("inf"))
        windows = {}
        for context in timed:
            start = source.warm_up_steps + longest - context
            state = warm_up(objective.recurrent, segment, start)
            windows[context] = segment.between(start, segment.steps), state
        turn, began = 0, time.monotonic()
        while turn <= TURNS or time.monotonic() - began < SECONDS:
            for context in timed:
                seconds = _time(objective, *windows[context], context)
                if turn:  # the first warms up
                    best[context] = min(best[context], seconds)
            turn += 1
    times = np.maximum.accumulate([best[c] for c in timed])
    return np.asarray(np.interp(contexts, timed, times / times[0]))


def _time(objective: Objective, window: Segment, state: State, context: int) -> float:
    parameters = list(trained_parameters(objective).values())
    device = objective.recurrent.device
    # The time of this thread leaves out what other processes do, and BLAS's other threads, which
    # wait busily after a product. An accelerator runs asynchronously, so there the wall clock
    # counts, once the device has finished.
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)
    wait = getattr(accelerator, "synchronize", lambda: None)
    clock = time.thread_time if accelerator is None else time.perf_counter
    wait()
    began = clock()
    loss = window_forward(objective, window, state, context).loss
    torch.autograd.grad(loss, parameters, allow_unused=True)
    wait()
    return clock() - began
