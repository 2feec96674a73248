"""The mean loss of a whole split, with the state carried from its first step to its last."""

from __future__ import annotations

import torch
from torch import nn

from .._torch.compiling import eager
from .._torch.number_formats import wide
from .._torch.preserve_model import preserve
from ..data.nest import detach
from ..data.stream import Stream, require_stream
from ..model.checks import look
from ..model.objective import CountLosses, Objective
from ..model.recurrent import LossFn, Recurrent
from ..model.running import run_pieces
from .carried_states import start_state


def evaluate(
    model: nn.Module | Recurrent,
    loss_fn: LossFn,
    stream: Stream,
    *,
    chunk: int = 256,
    count_losses: CountLosses | None = None,
    batch_first: bool | None = None,
    state_batch_dim: int | None = None,
) -> float:
    """Return the mean loss over every step and row, in eval mode, without gradient.

    The chunk bounds memory. The stream is read from its start, and then put back where it was.

    Args:
        model: any recurrent module.
        loss_fn: `loss_fn(outputs, targets)`. If the split is longer than `chunk`, it must be a
            mean over time.
        stream: the split.
        chunk: steps evaluated at a time.
        count_losses: as in `AdaptiveTBPTT`.
        batch_first: layout of the model, as in `probe`.
        state_batch_dim: as in `probe`.

    >>> from adaptive_tbptt import SequenceStream
    >>> stream = SequenceStream(torch.zeros(5, 2, 3), torch.ones(5, 2, 4))
    >>> model = nn.RNN(3, 4, bias=False)
    >>> evaluate(model, nn.functional.mse_loss, stream)
    1.0
    """
    require_stream(stream)
    objective = Objective.of(
        model, loss_fn, count_losses, batch_first=batch_first, state_batch_dim=state_batch_dim
    )
    if stream.available(stream.cursor + 1) > stream.cursor:
        cut = stream.length is None or stream.length - stream.burn_in > chunk
        why = f"The result is a mean over chunks of {chunk} steps: pass a larger chunk"
        with torch.no_grad():  # nothing is trained: what the state does to gradients is no matter
            look(objective, stream.peek(chunk), mean=why if cut else None)
    return mean_loss(*evaluate_sum(objective, stream, chunk))


def mean_loss(total: float, count: float) -> float:
    """Return the mean; refuse a stream without a loss."""
    if count == 0:
        raise ValueError("the stream holds no loss: every target is masked")
    return total / count


def evaluate_sum(objective: Objective, stream: Stream, chunk: int) -> tuple[float, float]:
    """Return the sum and the number of losses; see `evaluate`."""
    recurrent = objective.recurrent
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    before = stream.state_dict() if stream.cursor != stream.burn_in else None
    stream.rewind()
    with preserve(recurrent.module, train=False), torch.no_grad():
        state = start_state(recurrent, stream)
        while stream.available(stream.cursor + 1) > stream.cursor:
            segment = stream.read(chunk)
            stream.forget(stream.cursor)
            with eager(segment.steps != chunk or segment.resets is not None):
                read = []
                for piece in run_pieces(recurrent, segment, state):
                    read.append(piece)
                    state = detach(piece.state)
                weight = objective.count_losses(segment.targets)
                if weight > 0:
                    added = wide(objective.loss_of_pieces(read, segment.targets)) * weight
                    total = total.to(added.device) + added
                    count += weight
    stream.rewind()
    if before is not None:  # the stream was in use
        stream.load_state_dict(before)
    return float(total), count
