"""One training run in a folder of its own: config, metrics, checkpoints, figures, summary."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adaptive_tbptt import SequenceStream, Trainer, choose_truncation
from adaptive_tbptt.diagnosis import Sampling
from adaptive_tbptt.distributed import present_ranks
from adaptive_tbptt.errors import DamagedFileError
from adaptive_tbptt.measure import Source
from adaptive_tbptt.train import FitResult, RunFolder, TrainingError, read_rows, write_text

from ..config import TrainConfig
from ..decay import DecayDiagnosis, diagnose_decay


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        fit: how training ended, with the metrics of every epoch.
        diagnosis: the decay at the best parameters.
        folder: where everything is.
    """

    fit: FitResult
    diagnosis: DecayDiagnosis
    folder: Path

    @property
    def best(self) -> dict[str, Any]:
        """The metrics of the best epoch."""
        assert self.fit.best_epoch is not None
        return self.fit.history[self.fit.best_epoch - 1]


def make_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimiser that the configuration names, in its fused form where it has one."""
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "adadelta":
        return torch.optim.Adadelta(model.parameters(), **options)
    # One pass over the parameters instead of several: six times faster with weight decay.
    options["fused"] = all(p.device.type in ("cpu", "cuda") for p in model.parameters())
    if config.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), **options)
    return torch.optim.SGD(model.parameters(), momentum=config.momentum, **options)


def train_run(
    config: TrainConfig,
    folder: str | Path,
    *,
    resume: bool = False,
    device: str = "cpu",
    show: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> RunResult:
    """Train, keep the best parameters by validation loss, test and diagnose them.

    Args:
        config: a task's configuration with `delta` or `k` set.
        folder: the run folder.
        resume: go on with what the folder holds; its configuration must be the same, but for the
            number of epochs.
        device: where to train.
        show: whether to show progress.
        clock: what tells the time that training takes.
    """
    folder = Path(folder)
    # Before anything is written: data may be missing, the device too.
    streams = config.streams()
    model = config.model().to(device)
    if len(streams["valid"]) < config.burn_in + config.lags:
        raise ValueError(
            f"validation rows of {len(streams['valid'])} steps are too short for a probe of "
            f"{config.burn_in} + {config.lags}"
        )
    ranks = present_ranks()
    if ranks.leads:
        with RunFolder(folder).locked():
            _claim(config, folder, resume)
    torch.manual_seed(config.seed + ranks.index)  # dropout
    optimizer = make_optimizer(config, model)
    scheduler = None
    if config.lr_decay != 1.0:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, config.lr_decay)
    tbptt = config.make_tbptt(model)
    trainer = Trainer(
        tbptt,
        optimizer,
        run_dir=folder,
        scheduler=scheduler,
        step_scale=config.rate_rule,
        clip=config.make_clip(),
        eval_chunk=config.eval_chunk,
        callbacks=[
            lambda trainer, metrics: _test_at_best(trainer, metrics, config, streams["test"]),
            lambda trainer, metrics: _error_bars(trainer, metrics, config, streams["train"]),
        ],
        show=show,
        clock=clock,
    )
    fit = trainer.fit(streams["train"], streams["valid"], epochs=config.epochs, resume=resume)
    trainer.load_best()
    diagnosis = diagnose_decay(
        model,
        config.loss_fn,
        streams["valid"],
        lags=config.lags,
        k_range=(config.k_min, config.k_max),
        gauge=config.state_gauge(),
        sampling=Sampling(samples=256, burn_in=config.burn_in, level=0.95, seed=config.seed),
    )
    return RunResult(fit, diagnosis, folder)


def _claim(config: TrainConfig, folder: Path, resume: bool) -> None:
    """Write the configuration, or check that a run to be resumed has the same."""
    path = folder / "config.toml"
    try:
        # Without checkpoint and metrics there is nothing to go on with, and nothing to lose.
        if RunFolder(folder).holds_run and not resume:
            raise ValueError(f"{folder} already holds a run: --resume goes on with it")
        if RunFolder(folder).holds_run and path.exists():
            before = type(config).from_toml(path).changed(epochs=config.epochs)
            differences = before.difference(config)
            if differences:
                listed = "\n  ".join(differences)
                raise ValueError(f"{folder} holds a run with another configuration:\n  {listed}")
            done = 0
            with contextlib.suppress(DamagedFileError):  # the trainer restores what it can
                rows = read_rows(folder / "metrics.jsonl")
                done = sum(row.get("event") == "epoch" for row in rows)
            if done > config.epochs:
                raise ValueError(f"{folder} holds {done} epochs already, more than {config.epochs}")
        write_text(path, f'task = "{config.task}"\n\n{config.to_toml()}')
    except OSError as error:
        raise TrainingError(f"cannot write to {folder}: {error}") from error


def _test_at_best(
    trainer: Trainer, metrics: dict[str, Any], config: TrainConfig, test: SequenceStream
) -> None:
    """Add the test metrics of the parameters that are best on the validation data so far."""
    metrics.update(config.valid_metrics(metrics["valid_loss"]))
    if trainer.best_epoch == metrics["epoch"]:
        metrics.update(config.test_metrics(trainer, test))
    else:
        before = trainer.history[-1] if trainer.history else {}  # none yet was finite
        metrics.update({name: v for name, v in before.items() if name.startswith("test_")})


def _error_bars(
    trainer: Trainer, metrics: dict[str, Any], config: TrainConfig, train: SequenceStream
) -> None:
    """Repeat the estimate on other minibatches: the paper's error bars. Not counted as data."""
    every = config.error_bar_every
    if not every or (metrics["epoch"] % every and metrics["epoch"] != 1):
        return
    gauge, tbptt = config.make_gauge(), trainer.tbptt
    assert tbptt.k is not None
    seed = 1_000_003 * (config.seed + 1) + metrics["epoch"]
    source = Source(tbptt.objective, train, config.burn_in, torch.Generator().manual_seed(seed))
    request = gauge.request(config.lags, (config.k_min, config.k_max), config.losses, 0)
    ks, biases, betas = [], [], []
    for _ in range(config.error_bar_repeats):
        evidence = request.measure(source)
        bias = gauge.bias(evidence)
        bound = bias.relative_at(tbptt.k)
        biases.append(bound if math.isfinite(bound) else None)
        betas.append(bias.beta)
        if config.delta is not None:
            choice = choose_truncation(
                bias, delta=config.delta, k_min=config.k_min, k_max=config.k_max
            )
            ks.append(choice.k)
    metrics["repeats"] = {"k": ks, "relative_bias": biases, "beta": betas}
