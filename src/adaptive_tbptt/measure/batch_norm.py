"""Batch normalisation makes the rows of a measurement depend on each other: refused."""

from __future__ import annotations

from torch import nn


def refuse_batch_norm(module: nn.Module) -> None:
    """Refuse batch normalisation that would use the rows of a measurement for its statistics."""
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training:
            raise ValueError(
                f"'{name}' is batch normalisation in training mode: it makes the rows depend on "
                "each other. Measure in eval mode, or normalise otherwise (LayerNorm)"
            )
