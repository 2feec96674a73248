"""Gradient clipping at a fixed norm, or at norm / K2 as in the authors' release."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Clip:
    """Clip the total norm of the gradient.

    Attributes:
        norm: the largest norm allowed.
        per_loss: divide `norm` by K2, the number of losses of the window.

    Choosing `per_loss`: False is the usual clipping. True is that of the authors' release, which
    clips at 1 / K2 after dividing the gradient by K2: it clips long windows harder.

    >>> weight = torch.nn.Parameter(torch.zeros(4))
    >>> weight.grad = torch.full((4,), 3.0)
    >>> Clip(0.5)([weight], losses=10)
    tensor(6.)
    >>> round(weight.grad.norm().item(), 5)
    0.5
    """

    norm: float
    per_loss: bool = False

    def __post_init__(self) -> None:
        if not self.norm > 0.0:
            raise ValueError(f"norm must be positive, got {self.norm}")

    def __call__(self, parameters: Iterable[Tensor], losses: int) -> Tensor:
        """Clip `.grad` in place; return the norm before clipping.

        Args:
            parameters: their gradients form the total norm.
            losses: K2 of the window (`window.losses`).
        """
        limit = self.norm / losses if self.per_loss else self.norm
        return torch.nn.utils.clip_grad_norm_(parameters, limit)
