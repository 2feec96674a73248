"""The memory of a window: what its graph holds when the backward pass starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .._torch.preserve_model import measuring, random_state_of
from ..data.nest import State, leaves, map_leaves
from ..data.segment import Segment
from ..loop.window_pass import Recompute, window_forward
from ..measure.sampling import Source
from ..model.objective import Objective
from ..model.running import warm_up

CONTEXT = 8  # steps; arbitrary: memory grows by the same amount with every step
PLENTY = 1_000_000  # arbitrary: nobody counts steps beyond
MOST = 2**40  # steps; arbitrary: no window is longer


@dataclass(frozen=True)
class WindowMemory:
    """Bytes that a window holds for its backward pass.

    Parameters, gradients, the optimiser, the data and what an operation needs while it runs come
    on top.

    Attributes:
        losses: K2, the steps of a window that carry a loss.
        fixed: of a window, whatever its length.
        loss_step: of a step that carries a loss.
        context_step: of a step of context.
        kept_step: of a step that carries a loss, if the backward pass runs it again.
        restart: of what a piece needs to run again: the state that enters it, and torch's random
            state (5 kB on the CPU).
    """

    losses: int
    fixed: float
    loss_step: float
    context_step: float
    kept_step: float
    restart: float

    def held(self, steps: int, recompute: int | None = None) -> float:
        """Return the bytes of a window of `steps` steps; its last `losses` steps carry losses."""
        losses = min(steps, self.losses)
        if recompute is None or steps <= recompute:
            context = steps - losses
            return self.fixed + losses * self.loss_step + context * self.context_step
        pieces = steps / recompute
        piece = self.fixed + recompute * self.context_step
        return piece + losses * self.kept_step + pieces * self.restart

    def longest(self, gigabytes: float, recompute: int | None = None) -> int:
        """Return the most steps of a window that fit into memory; 0 if not even one does.

        Args:
            gigabytes: 10^9 bytes each.
            recompute: as in `AdaptiveTBPTT`.
        """
        low, high = 0, MOST
        while low < high:
            middle = (low + high + 1) // 2
            if self.held(middle, recompute) <= gigabytes * 1e9:
                low = middle
            else:
                high = middle - 1
        return low

    def sentence(self, gigabytes: float) -> str:
        """Say how long a window fits into memory, held and recomputed."""
        held = self.longest(gigabytes)
        if held >= PLENTY:
            return f"{gigabytes:g} GB hold a window of more than {PLENTY:,} steps."
        # The pieces for which a window twice as long as the held one needs least.
        pieces = max(1, round(math.sqrt(2 * held * self.restart / max(self.context_step, 1.0))))
        again = self.longest(gigabytes, pieces)
        length = f"{again:,} steps" if again < PLENTY else f"more than {PLENTY:,} steps"
        return (
            f"{gigabytes:g} GB hold a window of {held:,} steps, {self.losses} of them with a loss; "
            f"with recompute={pieces}, one of {length}. Parameters, optimiser and data come on top."
        )


def window_memory(source: Source, losses: int) -> WindowMemory:
    """Measure what windows hold: with no context, with some, and with losses that run again.

    Args:
        source: model, loss and data.
        losses: K2; the loss is called on as many steps as in training.
    """
    objective = source.objective
    recurrent = objective.recurrent
    piece = math.ceil(losses / 4)  # arbitrary; pieces of one step would be slow
    last = losses - piece * ((losses - 1) // piece)  # the last piece is held
    with measuring(objective.modules, source.train):
        segment = recurrent.place(source.draw(losses, losses))
        recurrent.dims(segment.inputs)  # whether the outputs of pieces can be joined
        state = warm_up(recurrent, segment, source.warm_up_steps)
        window = segment.between(source.warm_up_steps, segment.steps)._replace(resets=None)

        def held(context: int, recompute: Recompute | None = None) -> int:
            # Its first step again and again: what the context reads does not matter here.
            longer = map_leaves(lambda x: torch.cat([x[:1]] * context + [x]), window)
            return held_bytes(objective, longer, state, context, recompute)

        none, some, more = (held(context) for context in (0, CONTEXT, 2 * CONTEXT))
        again = held(0, Recompute(piece))
    step = (more - some) / CONTEXT
    fixed = max(some - none - CONTEXT * step, 0.0)  # of a call, whatever its steps
    return WindowMemory(
        losses=losses,
        fixed=fixed,
        loss_step=(none - fixed) / losses,
        context_step=step,
        kept_step=max(again - fixed - last * step, 0.0) / losses,
        restart=float(sum(x.nbytes for x in (*leaves(state), *random_state_of(recurrent.module)))),
    )


def held_bytes(
    objective: Objective,
    segment: Segment,
    state: State,
    context: int,
    recompute: Recompute | None = None,
) -> int:
    """Run a window forward and return the bytes that autograd holds for its backward pass.

    Tensors that share memory count once; parameters, buffers and the data do not count.
    """
    found: dict[int, Tensor] = {}  # keeps what it counts, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        found[_memory(tensor)] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        window_forward(objective, segment, state, context, recompute=recompute)
    weights = [x for module in objective.modules for x in (*module.parameters(), *module.buffers())]
    others = {_memory(x) for x in (*weights, *leaves(segment), *leaves(state))}
    return sum(
        tensor.untyped_storage().nbytes() for key, tensor in found.items() if key not in others
    )


def _memory(tensor: Tensor) -> int:
    """Identify the memory that a tensor views."""
    return tensor.untyped_storage()._cdata
