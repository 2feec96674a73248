"""The settings of a run that a checkpoint must agree with to be resumed."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from ..errors import TrainingError
from ..loop.adaptive import AdaptiveTBPTT
from ..loop.clipping import Clip
from ..loop.step_scale import Rule


def settings_of(
    tbptt: AdaptiveTBPTT, optimizer: Optimizer, scheduler: Any, rule: Rule, clip: Clip | None
) -> dict[str, str]:
    """Return the settings as text, by name.

    Names and wording are those of all checkpoints so far: with others, these could not be resumed.
    """
    return {
        "controller": repr(tbptt.controller),
        "optimizer": f"{type(optimizer).__name__}, {len(optimizer.param_groups)} groups",
        "scheduler": type(scheduler).__name__,
        "step_scale": rule,
        "clip": repr(clip),
        "losses": _losses_setting(tbptt),
        "overlap": repr(tbptt.overlap),
        "estimates": repr((tbptt.estimates_per_epoch, tbptt.estimate_every, tbptt.burn_in)),
    }


def _losses_setting(tbptt: AdaptiveTBPTT) -> str:
    """Return `losses` as an integer ('5': five steps), or `losses_per_k` as a float ('0.5': K / 2).

    Once both were one argument, whose type made the difference; checkpoints keep that form.
    """
    if tbptt.losses is not None:
        return repr(int(tbptt.losses))
    return repr(1.0 if tbptt.losses_per_k is None else float(tbptt.losses_per_k))


def require_same_settings(saved: dict[str, str], present: dict[str, str], source: str) -> None:
    """Refuse to resume a run with other settings; name every one that differs.

    Args:
        saved: those of the checkpoint.
        present: those of the run that would go on with it.
        source: where the checkpoint is.

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
