"""Parameters and buffers of what is trained: the model, and the loss where it is a module."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from .._torch.compiling import plain
from ..loop.adaptive import AdaptiveTBPTT
from .checkpoint import load_model


class Weights(NamedTuple):
    """State dicts of the model and of the loss.

    Attributes:
        model: that of the model; of the module inside, where the model is compiled.
        loss: a list with that of the loss, or an empty one where the loss is a plain function.
    """

    model: dict[str, Tensor]
    loss: list[dict[str, Any]]


def weights_of(tbptt: AdaptiveTBPTT) -> Weights:
    """Return the present weights; they share memory with the modules."""
    model, *losses = tbptt.modules
    return Weights(plain(model).state_dict(), [module.state_dict() for module in losses])


def copy_weights(tbptt: AdaptiveTBPTT) -> Weights:
    """Return a copy of the present weights, which training does not change."""
    return copy.deepcopy(weights_of(tbptt))


def load_weights(tbptt: AdaptiveTBPTT, weights: Weights, source: str) -> None:
    """Load weights; `source` names them in the error where they do not fit."""
    model, *losses = tbptt.modules
    load_model(plain(model), weights.model, source)
    # Checkpoints from before losses were saved hold none, hence strict=False.
    for module, state in zip(losses, weights.loss, strict=False):
        load_model(module, state, source)


def refuse_unsaved_parameters(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    """Refuse an optimiser of parameters that no checkpoint would hold and no process would share.

    Args:
        optimizer: the optimiser of the run.
        parameters: those of the model and of the loss.
    """
    known = set(parameters)
    unsaved = [p for group in optimizer.param_groups for p in group["params"] if p not in known]
    if unsaved:
        raise ValueError(
            f"{len(unsaved)} of the optimiser's parameters belong neither to the model nor to the "
            "loss, so no checkpoint would hold them: make them part of one of the two"
        )
