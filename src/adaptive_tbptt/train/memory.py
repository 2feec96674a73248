"""How much memory a window needs, before training finds out."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._torch.compiling import eager
from .._torch.preserve_model import preserve
from ..data.nest import leaves
from ..data.segment import Segment
from ..data.stream import Stream
from ..loop.adaptive import AdaptiveTBPTT
from ..loop.window_pass import window_forward
from ..model.losses import CountLosses
from ..model.recurrent import LossFn, Recurrent

SAMPLE_STEPS = 24  # enough that what grows with the window outweighs what does not


def activation_bytes(
    recurrent: Recurrent, loss_fn: LossFn, segment: Segment, context: int, count_losses: CountLosses
) -> int:
    """Return the bytes that the graph of one window holds for its backward pass."""
    held: dict[int, int] = {}

    def note(tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    # There anyway: the parameters, and the data that a segment is cut out of.
    there = {p.untyped_storage().data_ptr() for p in recurrent.module.parameters()}
    there |= {x.untyped_storage().data_ptr() for part in segment for x in leaves(part)}
    with (
        preserve(recurrent.module),
        eager(),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        # Kept until the sum is taken: freed memory would be handed out again.
        result = window_forward(recurrent, loss_fn, segment, None, context, count_losses)
        total = sum(size for pointer, size in held.items() if pointer not in there)
    del result
    return total


def estimate_window_bytes(
    recurrent: Recurrent,
    loss_fn: LossFn,
    segment: Segment,
    k: int,
    losses: int,
    count_losses: CountLosses,
) -> int:
    """Estimate the activations of a window of k + losses steps from three short ones.

    A graph grows by the same amount with every step of context, and by another with every step
    that carries a loss, so three short windows give the three unknowns.

    Args:
        recurrent: the model.
        loss_fn: the loss.
        segment: `SAMPLE_STEPS` steps of data.
        k: context of the window in question.
        losses: its losses.
        count_losses: as in `window_forward`.
    """

    def measure(context: int, with_loss: int) -> int:
        return activation_bytes(
            recurrent, loss_fn, segment.between(0, context + with_loss), context, count_losses
        )

    base = measure(8, 8)
    per_context, per_loss = (measure(16, 8) - base) / 8, (measure(8, 16) - base) / 8
    return max(0, round(base + per_context * (k - 8) + per_loss * (losses - 8)))


def free_bytes(device: torch.device) -> int | None:
    """Return the memory that is free on a device; None where it cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    try:  # what Linux would make free, caches of files included
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def warn_of_memory(tbptt: AdaptiveTBPTT, train: Stream) -> None:
    """Say before training starts that a window of k_max will not fit."""
    if tbptt.trained_steps:  # said before, and looking ahead would change what is probed next
        return
    k = tbptt.controller.k_max
    if train.length is not None:
        k = min(k, train.length)
    free = free_bytes(tbptt.recurrent.device)
    start, stop = train.cursor, train.cursor + SAMPLE_STEPS
    if free is None or train.available(stop) < stop:
        return
    needed = estimate_window_bytes(
        tbptt.recurrent,
        tbptt.loss_fn,
        tbptt.ranks.deal(train).segment(start, stop),
        k if tbptt.overlap else 0,
        tbptt.losses_per_window(k),
        tbptt.count_losses,
    )
    if needed > free and tbptt.ranks.leads:
        warnings.warn(
            f"a window at k_max={k} needs about {needed / 2**30:.1f} GiB for its activations, "
            f"{free / 2**30:.1f} GiB are free: lower k_max or the batch size",
            UserWarning,
            stacklevel=3,
        )
