"""What a checkpoint holds of a training run, and how a resumed run takes it back."""

from __future__ import annotations

import warnings
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
from .metrics import LossMean

if TYPE_CHECKING:
    from .trainer import Trainer

Weights = list[dict[str, Any]]
"""State dicts of the model and, if the loss is a module, of the loss."""


def _modules(tbptt: AdaptiveTBPTT) -> list[nn.Module]:
    model, *losses = tbptt.modules
    return [plain(model), *losses]


def weights_of(tbptt: AdaptiveTBPTT) -> Weights:
    """Return the present weights; they share memory with the modules."""
    return [module.state_dict() for module in _modules(tbptt)]


def load_weights(tbptt: AdaptiveTBPTT, weights: Weights, source: str) -> None:
    """Load weights; if they do not fit, the error names their `source`."""
    # Checkpoints from before losses were saved hold the model's only, hence strict=False.
    for module, state in zip(_modules(tbptt), weights, strict=False):
        load_model(module, state, source)


def state_dict(trainer: Trainer, stream: Stream) -> dict[str, Any]:
    """Return everything that a resumed run needs to equal one that never stopped.

    With several processes, all must call this. Any number of processes can load the result.
    """
    model, *loss = weights_of(trainer.tbptt)
    best = trainer.best_weights
    scheduler = trainer.scheduler
    return {
        "settings": trainer.settings,
        "model": model,
        "loss": loss,
        "optimizer": trainer.optimizer.state_dict(),
        "given": trainer.given,
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "tbptt": trainer.tbptt.state_dict(),
        "stream": stream.state_dict(),
        "random": trainer.ranks.gather(get_random_state()),
        "meter": {"total": trainer.train_loss.total, "weight": trainer.train_loss.weight},
        "progress": (trainer.epoch, trainer.updates, trainer.seconds),
        "history": trainer.history,
        "best": (trainer.best_epoch, trainer.best_loss, best[0] if best else None),
        "best_loss": best[1:],
        "metrics_lines": trainer.folder.lines,
    }


def load_state_dict(trainer: Trainer, stream: Stream, saved: dict[str, Any], source: str) -> None:
    """Continue from what `state_dict` returned; errors name its `source`."""
    require_same_settings(saved["settings"], trainer.settings, source)
    # The weights first: if they do not fit, this raises and nothing has changed.
    load_weights(trainer.tbptt, [saved["model"], *saved.get("loss", [])], source)
    trainer.optimizer.load_state_dict(saved["optimizer"])
    _warn_of_other_options(trainer, saved.get("given"), source)
    if trainer.scheduler is not None:
        trainer.scheduler.load_state_dict(saved["scheduler"])
    stream.load_state_dict(saved["stream"])
    trainer.tbptt.load_state_dict(saved["tbptt"])
    trainer.train_loss = LossMean(saved["meter"]["total"], saved["meter"]["weight"])
    trainer.epoch, trainer.updates, trainer.seconds = saved["progress"]
    trainer.history = saved["history"]
    trainer.best_epoch, trainer.best_loss, model = saved["best"]
    # "best_loss" is missing in checkpoints from before losses were saved.
    trainer.best_weights = [] if model is None else [model, *saved.get("best_loss", [])]
    # Each process continues with its own random numbers; one that is new draws new ones.
    random, index = saved["random"], trainer.ranks.index
    set_random_state(random[min(index, len(random) - 1)])
    if index >= len(random):
        torch.manual_seed(torch.initial_seed() + index)


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each group of parameters that are numbers, as they were given."""
    return [
        {n: v for n, v in group.items() if isinstance(v, int | float)}
        for group in optimizer.param_groups
    ]


def _warn_of_other_options(
    trainer: Trainer, given: list[dict[str, Any]] | None, source: str
) -> None:
    """Say which options of the optimiser were given anew and have no effect.

    What was given is compared, because schedulers change what is in use.
    """
    changed = [
        f"{name} was given as {old.get(name)}, now as {value}"
        for old, new in zip(given or [], trainer.given, strict=False)
        for name, value in new.items()
        if old.get(name) != value
    ]
    if given is not None:
        trainer.given = given
    if changed and trainer.ranks.leads:
        warnings.warn(
            f"the optimiser and its scheduler continue from {source}; new options have no effect: "
            f"{'; '.join(dict.fromkeys(changed))}. To change them in the middle of a run, "
            "set optimizer.param_groups in a callback",
            UserWarning,
            stacklevel=2,
        )


def settings_of(trainer: Trainer) -> dict[str, str]:
    """Return the settings that a checkpoint must agree with to be resumed, as text by name.

    Names and wording are those of all checkpoints so far: with others, these could not be resumed.
    """
    tbptt, optimizer = trainer.tbptt, trainer.optimizer
    # `losses` and `losses_per_k` were once one argument, whose type made the difference: '5' is
    # five steps, '0.5' is K / 2. Checkpoints keep that form.
    per_k = 1.0 if tbptt.losses_per_k is None else float(tbptt.losses_per_k)
    losses = repr(per_k if tbptt.losses is None else int(tbptt.losses))
    if tbptt.losses is not None and tbptt.losses_per_k is not None:
        losses = f"{losses}, at least {per_k} K"
    if tbptt.long_windows:
        losses = f"{losses}, long windows of {tbptt.long_windows}"
    return {
        "controller": repr(tbptt.controller),
        "optimizer": f"{type(optimizer).__name__}, {len(optimizer.param_groups)} groups",
        "scheduler": type(trainer.scheduler).__name__,
        "step_scale": trainer.step_scale,
        "clip": repr(trainer.clip),
        "losses": losses,
        "overlap": repr(tbptt.overlap),
        "estimates": repr((tbptt.estimates_per_epoch, tbptt.estimate_every, tbptt.burn_in)),
    }


def require_same_settings(saved: dict[str, str], present: dict[str, str], source: str) -> None:
    """Refuse to resume a run with other settings; name every one that differs.

    >>> require_same_settings({"losses": "5"}, {"losses": "7"}, "last.safetensors")
    Traceback (most recent call last):
    adaptive_tbptt.errors.TrainingError: last.safetensors was written with other settings: losses
    was 5, is 7
    """
    # `lags` of a controller was called `window` when the first checkpoints were written.
    saved = {**saved, "controller": saved.get("controller", "").replace("window=", "lags=")}
    differing = [
        f"{name} was {saved.get(name)}, is {value}"
        for name, value in present.items()
        if saved.get(name) != value
    ]
    if differing:
        raise TrainingError(f"{source} was written with other settings: {'; '.join(differing)}")
