"""Gradient clipping at a fixed norm, or at c / K2 as the authors' release does."""

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
        per_loss: divide `norm` by the number of losses K2 of the window: the release clips at
            1 / K2 after normalising by K2.
    """

    norm: float
    per_loss: bool = False

    def __post_init__(self) -> None:
        if not self.norm > 0.0:
            raise ValueError(f"norm must be positive, got {self.norm}")

    def __call__(self, parameters: Iterable[Tensor], losses: int) -> Tensor:
        """Clip in place; return the norm before."""
        limit = self.norm / losses if self.per_loss else self.norm
        return torch.nn.utils.clip_grad_norm_(parameters, limit)
