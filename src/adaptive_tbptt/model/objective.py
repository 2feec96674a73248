"""What is trained: a model, its loss, and the rule that counts the losses some targets hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.compiling import plain
from ..data.nest import Nest, leaves, map_leaves, slice_steps
from .recurrent import LossFn, Recurrent, as_recurrent
from .running import Piece

CountLosses = Callable[[Nest], float]


@dataclass(frozen=True)
class Objective:
    """A model and the loss it is trained on.

    Attributes:
        recurrent: the model.
        loss_fn: `loss_fn(outputs, targets)`, a mean over time and batch.
        count_losses: `count_losses(targets)`, how many losses that mean is over.
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
        """Wrap what a user passes; None counts as `default_count` does."""
        refuse_sums(loss_fn)
        recurrent = as_recurrent(model, batch_first=batch_first, state_batch_dim=state_batch_dim)
        return Objective(recurrent, loss_fn, count_losses or default_count(loss_fn))

    @property
    def modules(self) -> list[nn.Module]:
        """The model, and the loss where it is a module: it may have parameters of its own."""
        loss = [self.loss_fn] if isinstance(self.loss_fn, nn.Module) else []
        return [self.recurrent.module, *loss]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What training changes, each parameter once."""
        return list(dict.fromkeys(p for module in self.modules for p in module.parameters()))

    def loss(self, features: Any, targets: Nest) -> Tensor:
        """Evaluate head and loss on one piece; targets are time first, on any device."""
        recurrent = self.recurrent
        return recurrent.loss_of(self.loss_fn, recurrent.head(features), recurrent.place(targets))

    def loss_of_pieces(self, pieces: list[Piece], targets: Nest) -> Tensor:
        """Return the mean loss of consecutive pieces.

        Features of a core that are `(time, batch, ...)` are joined, so head and loss are called
        once however many resets cut the pieces. Outputs of any other layout cannot be joined: the
        means of the pieces are weighted by their losses.

        Args:
            pieces: at least one of their targets counts.
            targets: of all of them, on any device.
        """
        if len(pieces) == 1:
            return self.loss(pieces[0].features, targets)
        if self._can_be_joined(pieces, targets):
            dim, read = self.recurrent.time_dim, [piece.features for piece in pieces]
            return self.loss(map_leaves(lambda *parts: torch.cat(parts, dim), *read), targets)
        first, values, counts = pieces[0].start, [], []
        for piece in pieces:
            some = slice_steps(targets, piece.start - first, piece.stop - first)
            count = self.count_losses(some)
            if count > 0:
                values.append(self.loss(piece.features, some))
                counts.append(count)
        shares = [count / sum(counts) for count in counts]
        return torch.stack([v * share for v, share in zip(values, shares, strict=True)]).sum()

    def _can_be_joined(self, pieces: list[Piece], targets: Nest) -> bool:
        rows = leaves(targets)[0].shape[1]
        return self.recurrent.has_features and all(
            self.recurrent.is_laid_out(leaf, piece.stop - piece.start, rows)
            for piece in pieces
            for leaf in leaves(piece.features)
        )


def refuse_sums(loss_fn: LossFn) -> None:
    """Refuse a loss that says it is no mean: windows of other lengths would weigh differently."""
    if getattr(loss_fn, "reduction", "mean") != "mean":
        raise ValueError(
            f"the loss has reduction={loss_fn.reduction!r}: it must be a mean over time and "  # type: ignore[attr-defined]
            "batch, so that windows of other lengths weigh the same"
        )


def default_count(loss_fn: LossFn) -> CountLosses:
    """Count every step of every row, as a loss with `ignore_index` and class weights does.

    A loss that is no module does not say what it ignores. Torch's own functions ignore -100 among
    targets that are classes, which are int64.
    """
    function = not isinstance(loss_fn, nn.Module)
    loss = loss_fn if function else plain(loss_fn)  # type: ignore[arg-type]
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
