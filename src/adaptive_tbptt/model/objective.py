"""The training objective: a model, its loss, and the rule that counts the losses in targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.compiling import plain
from ..data.nest import Nest, leaves, rows_of, slice_steps, swap_time_and_batch
from ..data.padding import drop_padding, without_padding
from .recurrent import LossFn, Recurrent, as_recurrent
from .running import Piece

CountLosses = Callable[[Nest], float]


@dataclass(frozen=True)
class Objective:
    """A model and the loss it is trained on.

    Attributes:
        recurrent: the model.
        loss_fn: `loss_fn(outputs, targets)`, called once for all losses of a window.
        count_losses: `count_losses(targets)`, the number of losses in targets.
    """

    recurrent: Recurrent
    loss_fn: LossFn
    count_losses: CountLosses

    @staticmethod
    def of(
        model: nn.Module | Recurrent,
        loss_fn: LossFn,
        count_losses: CountLosses | None = None,
        *,
        batch_first: bool | None = None,
        state_batch_dim: int | None = None,
    ) -> Objective:
        """Wrap your model and loss; `count_losses=None` is `default_count(loss_fn)`."""
        reduction = getattr(loss_fn, "reduction", "mean")
        if reduction != "mean":
            raise ValueError(
                f"the loss has reduction={reduction!r}: it must be a mean over time and "
                "batch, so that windows of any length weigh the same"
            )
        recurrent = as_recurrent(model, batch_first=batch_first, state_batch_dim=state_batch_dim)
        return Objective(recurrent, loss_fn, of_present(count_losses or default_count(loss_fn)))

    @property
    def modules(self) -> list[nn.Module]:
        """The model, and the loss if it is a module: it may have parameters of its own."""
        loss = [self.loss_fn] if isinstance(self.loss_fn, nn.Module) else []
        return [self.recurrent.module, *loss]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of model and loss, each once."""
        return list(dict.fromkeys(p for module in self.modules for p in module.parameters()))

    def loss(self, features: Any, targets: Nest) -> Tensor:
        """Evaluate head and loss on one piece; targets are time first, on any device."""
        recurrent = self.recurrent
        return self.loss_of(recurrent.head(features), recurrent.place(targets))

    def loss_of(self, outputs: Any, targets: Nest) -> Tensor:
        """Evaluate the loss of all steps but padding; targets are time first."""
        recurrent = self.recurrent
        # What is known of the order of flat outputs is about `core`; a head comes after it.
        flat = recurrent.splits or recurrent.joins is not False
        outputs, targets = drop_padding(outputs, targets, recurrent.batch_first, flat)
        if recurrent.batch_first:
            targets = swap_time_and_batch(targets)
        value = self.loss_fn(outputs, targets)
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"loss_fn must return a scalar, such as the mean over time and batch; got {got}. "
                "Use reduction='mean'"
            )
        return value.reshape(()) if value.dim() else value

    def loss_of_pieces(self, pieces: list[Piece], targets: Nest) -> Tensor:
        """Return the loss of consecutive pieces.

        If all that the model returns is `(time, batch, ...)`, or has these two flattened into one,
        the pieces are joined, and head and loss run once however many cuts there are: the loss may
        be any function of the window. The time axis of other outputs is unknown. Then each piece
        has a loss of its own, weighted by its count, which is right for a mean over time and batch.

        Args:
            pieces: one or more, with at least one target that counts.
            targets: those of all pieces, on any device.
        """
        if len(pieces) == 1:
            return self.loss(pieces[0].features, targets)
        if self.recurrent.joins:
            read = [piece.features for piece in pieces]
            return self.loss(self.recurrent.join(read, rows_of(targets)), targets)
        first, values, counts = pieces[0].start, [], []
        for piece in pieces:
            some = slice_steps(targets, piece.start - first, piece.stop - first)
            count = self.count_losses(some)
            if count > 0:
                values.append(self.loss(piece.features, some))
                counts.append(count)
        shares = [count / sum(counts) for count in counts]
        return torch.stack([v * share for v, share in zip(values, shares, strict=True)]).sum()


def of_present(count_losses: CountLosses) -> CountLosses:
    """Return the same rule for targets that may be padded: it sees those of present steps."""

    def count(targets: Nest) -> float:
        kept = without_padding(targets)
        return count_losses(kept) if leaves(kept)[0].numel() else 0.0

    return count


def default_count(loss_fn: LossFn) -> CountLosses:
    """Return a rule that counts steps of rows, minus ignored ones, times class weights.

    A function does not say what it ignores. Torch's own functions ignore -100 among class targets,
    which are int64.
    """
    function = not isinstance(loss_fn, nn.Module)
    loss = plain(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
    ignored = getattr(loss, "ignore_index", -100 if function else None)
    weighted = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
    weights = getattr(loss, "weight", None) if weighted else None

    def count_losses(targets: Nest) -> float:
        first = leaves(targets)[0]
        guessed = function and first.dtype != torch.int64
        if ignored is None or guessed or first.is_floating_point():
            return float(first.shape[0] * first.shape[1])
        first = first.long()  # -100 is 156 among bytes
        counted = first != ignored
        if weights is None:
            return float(counted.sum())
        return float(weights.to(first.device)[first[counted]].sum())

    return count_losses
