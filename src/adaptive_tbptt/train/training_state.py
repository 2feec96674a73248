"""Everything of a training run that a checkpoint holds, and how it is put back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from .._torch.compiling import plain
from .._torch.random_state import get_random_state, set_random_state
from ..data.stream import Stream
from ..errors import TrainingError
from ..loop.adaptive import AdaptiveTBPTT
from .checkpoint import load_model

if TYPE_CHECKING:
    from .trainer import Trainer


def refuse_strangers(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    """Refuse an optimiser of parameters that no checkpoint would hold and no process share."""
    known = set(parameters)
    strangers = [p for group in optimizer.param_groups for p in group["params"] if p not in known]
    if strangers:
        raise ValueError(
            f"{len(strangers)} of the optimiser's parameters belong neither to the model nor to "
            "the loss, so they would not be saved: make them part of either"
        )


def losses_setting(tbptt: AdaptiveTBPTT) -> str:
    """Return K2 as checkpoints hold it: '5' is 5 steps, '0.5' is half of K.

    Checkpoints from before `losses_per_k` wrote the one argument there was, an int or a float.
    """
    if tbptt.losses is not None:
        return repr(int(tbptt.losses))
    return repr(1.0 if tbptt.losses_per_k is None else float(tbptt.losses_per_k))


def loss_states(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the state of the loss, if it is a module: it may learn too."""
    return [module.state_dict() for module in trainer.tbptt.modules[1:]]


def load_loss(trainer: Trainer, states: list[dict[str, Any]], source: str) -> None:
    """Put back what `loss_states` returned; a checkpoint from before losses were saved has none."""
    for module, state in zip(trainer.tbptt.modules[1:], states, strict=False):
        load_model(module, state, source)


def take(trainer: Trainer, train: Stream) -> dict[str, Any]:
    """Return what is needed to go on exactly; where several processes train, all must ask.

    It does not depend on the number of processes, but for their random states.
    """
    return {
        "settings": trainer.settings,
        "model": plain(trainer.model).state_dict(),
        "loss": loss_states(trainer),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": None if trainer.scheduler is None else trainer.scheduler.state_dict(),
        "tbptt": trainer.tbptt.state_dict(),
        "stream": train.state_dict(),
        "random": trainer.ranks.gather(get_random_state()),
        "meter": trainer.meter.state_dict(),
        "progress": (trainer.epoch, trainer.updates, trainer.seconds),
        "history": trainer.history,
        "best": (trainer.best_epoch, trainer.best_loss, trainer.best_state),
        "best_loss": trainer.best_loss_states,
        "metrics_lines": trainer.folder.lines,
    }


def put_back(trainer: Trainer, saved: dict[str, Any], train: Stream, source: str) -> None:
    """Go on from what `take` returned; refuse that of another kind of run.

    Args:
        trainer: a new one, with the same settings.
        saved: what was taken.
        train: the training stream.
        source: where it comes from, for messages.
    """
    differing = [
        f"{name} was {saved['settings'].get(name)}, is {value}"
        for name, value in trainer.settings.items()
        if saved["settings"].get(name) != value
    ]
    if differing:
        raise TrainingError(f"{source} was written with other settings: {'; '.join(differing)}")
    load_model(plain(trainer.model), saved["model"], source)
    load_loss(trainer, saved.get("loss", []), source)
    trainer.optimizer.load_state_dict(saved["optimizer"])
    if trainer.scheduler is not None:
        trainer.scheduler.load_state_dict(saved["scheduler"])
    train.load_state_dict(saved["stream"])
    trainer.tbptt.load_state_dict(saved["tbptt"])
    trainer.meter.load_state_dict(saved["meter"])
    trainer.epoch, trainer.updates, trainer.seconds = saved["progress"]
    trainer.history = saved["history"]
    trainer.best_epoch, trainer.best_loss, trainer.best_state = saved["best"]
    trainer.best_loss_states = saved.get("best_loss", [])
    _put_back_random(saved["random"], trainer.ranks.index)


def _put_back_random(saved: list[dict[str, Any]], index: int) -> None:
    """Give a process its own random state; one that was not there before gets a new one."""
    set_random_state(saved[min(index, len(saved) - 1)])
    if index >= len(saved):
        torch.manual_seed(torch.initial_seed() + index)
