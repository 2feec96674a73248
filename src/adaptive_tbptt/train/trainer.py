"""Algorithm 1 with what a long run needs: validation, checkpoints, budgets, progress, metrics."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .._torch import compiling as compiled
from ..data.stream import Stream, require_stream
from ..distributed.ranks import Ranks, present_ranks
from ..errors import TrainingError
from ..loop.adaptive import AdaptiveTBPTT
from ..loop.clipping import Clip
from ..loop.evaluation import evaluate_sum, mean_loss
from ..loop.step_scale import Rule, StepScale
from ..loop.window import Window
from ..model.losses import CountLosses
from ..model.recurrent import LossFn, Recurrent, as_recurrent
from ..truncate.controller import Controller
from . import training_state as snapshot
from .interrupt import DeferredInterrupt
from .loggers import Logger, Metrics, plain
from .loss_mean import LossMeter
from .memory import warn_of_memory
from .progress import ProgressDisplay, describe
from .run_folder import RunFolder

Callback = Callable[["Trainer", dict[str, Any]], None]


Stopped = Literal["epochs", "patience", "time"]


@dataclass(frozen=True)
class FitResult:
    """How a run ended.

    Attributes:
        epochs: epochs trained, those before a resume included.
        stopped: which budget ended it.
        best_epoch: epoch with the lowest validation loss; None without validation.
        best_loss: that loss.
        history: the metrics of every epoch.
    """

    epochs: int
    stopped: Stopped
    best_epoch: int | None
    best_loss: float | None
    history: list[dict[str, Any]]


class Trainer:
    """Train a recurrent module with truncated backpropagation, K fixed or chosen from delta.

    Args:
        model: any recurrent module; see `adaptive_tbptt.model`. `as_recurrent(module, ...)` says
            how it is laid out where that cannot be seen.
        loss_fn: `loss_fn(outputs, targets)`, a mean over time and batch.
        optimizer: any torch optimiser.
        controller: `FixedTruncation(k)` or `BiasTolerance(delta, ...)`.
        run_dir: folder for `metrics.jsonl` and `checkpoints/`; None writes nothing.
        scheduler: any torch scheduler; it sees the base rate, never the scaled one.
        scheduler_per: 'epoch', or 'window' for schedulers that count updates.
        step_scale: the rate is multiplied by sqrt(K2), K2 or 1 during a step; K2 = K by default.
        clip: gradient clipping.
        losses: K2; this and `losses_per_k`, `overlap`, `estimates_per_epoch`, `estimate_every`,
            `burn_in` and `count_losses` are as in `AdaptiveTBPTT`.
        patience: stop after so many epochs without a better validation loss.
        eval_chunk: steps that validation evaluates at a time.
        max_seconds: stop after so much training time, resumed runs included.
        checkpoint_seconds: between checkpoints inside an epoch; its end and a signal write one.
        clock: what tells the time, in seconds.
        loggers: further places for metrics.
        tensorboard: write scalars for TensorBoard too; None does so where it is installed.
        callbacks: each is called as `callback(trainer, metrics)` after every epoch and may add to
            the metrics; what it needs later it finds in `trainer.history`.
        show: whether to show progress.
        seed: of the segments that are probed.
        ranks: the processes that train together, as in `AdaptiveTBPTT`. The first of them writes
            and talks.

    Attributes:
        tbptt: the windows, with the history of K.
        epoch: epochs trained so far.
        updates: optimiser steps so far.
        seconds: training time so far.
        history: the metrics of every epoch.
        best_epoch: epoch with the lowest validation loss; None without validation.
        best_loss: that loss.
        best_state: the model's parameters there.
        best_loss_states: those of the loss, if it has any.
        folder: the run folder.
        settings: what a checkpoint must agree with to be resumed.
        meter: the losses of the epoch under way.
    """

    def __init__(
        self,
        model: nn.Module | Recurrent,
        loss_fn: LossFn,
        optimizer: Optimizer,
        controller: Controller,
        *,
        run_dir: str | Path | None = None,
        scheduler: Any = None,
        scheduler_per: Literal["epoch", "window"] = "epoch",
        step_scale: Rule = "sqrt",
        clip: Clip | None = None,
        losses: int | None = None,
        losses_per_k: float | None = None,
        overlap: bool = True,
        estimates_per_epoch: float = 1.0,
        estimate_every: int | None = None,
        burn_in: int = 20,
        count_losses: CountLosses | None = None,
        patience: int | None = None,
        eval_chunk: int = 256,
        max_seconds: float | None = None,
        checkpoint_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        loggers: Sequence[Logger] = (),
        tensorboard: bool | None = None,
        callbacks: Sequence[Callback] = (),
        show: bool = True,
        seed: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        if scheduler_per not in ("epoch", "window"):
            raise ValueError(f"scheduler_per must be 'epoch' or 'window', got {scheduler_per!r}")
        if scheduler_per == "window" and isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError("ReduceLROnPlateau looks at the validation loss: once per epoch")
        if patience is not None and patience < 1:
            raise ValueError(f"patience must be at least 1 epoch, got {patience}")
        if eval_chunk < 1:
            raise ValueError(f"eval_chunk must be at least 1 step, got {eval_chunk}")
        self.ranks = present_ranks() if ranks is None else ranks
        if not self.ranks.leads:  # the first process writes and talks
            run_dir, show, tensorboard, loggers = None, False, False, ()
        recurrent = as_recurrent(model)
        self.model, self.loss_fn, self.optimizer = recurrent.module, loss_fn, optimizer
        self.scheduler, self.scheduler_per = scheduler, scheduler_per
        self.clip, self.patience, self.max_seconds = clip, patience, max_seconds
        self.checkpoint_seconds, self.show, self.eval_chunk = checkpoint_seconds, show, eval_chunk
        self.folder = RunFolder(run_dir)
        self.loggers = [*loggers, *self.folder.tensorboard(tensorboard)]
        self.callbacks, self.clock = list(callbacks), clock
        self.tbptt = AdaptiveTBPTT(
            recurrent,
            loss_fn,
            controller,
            losses=losses,
            losses_per_k=losses_per_k,
            overlap=overlap,
            estimates_per_epoch=estimates_per_epoch,
            estimate_every=estimate_every,
            burn_in=burn_in,
            count_losses=count_losses,
            seed=seed,
            ranks=self.ranks,
        )
        snapshot.refuse_strangers(optimizer, self.tbptt.parameters)
        self.step_scale, self.meter = step_scale, LossMeter()
        self.settings = {
            "controller": repr(controller),
            "optimizer": f"{type(optimizer).__name__}, {len(optimizer.param_groups)} groups",
            "scheduler": type(scheduler).__name__,
            "step_scale": step_scale,
            "clip": repr(clip),
            "losses": repr((losses, losses_per_k)),
            "overlap": repr(overlap),
            "estimates": repr((estimates_per_epoch, estimate_every, burn_in)),
        }
        self.epoch, self.updates, self.seconds = 0, 0, 0.0
        self.history: list[dict[str, Any]] = []
        self.best_epoch: int | None = None
        self.best_loss: float | None = None
        self.best_state: dict[str, Tensor] | None = None
        self.best_loss_states: list[dict[str, Any]] = []

    def fit(
        self, train: Stream, valid: Stream | None = None, *, epochs: int, resume: bool = False
    ) -> FitResult:
        """Train until a budget is spent.

        Args:
            train: the training stream.
            valid: the validation stream; the parameters with its lowest loss are kept.
            epochs: total number of passes over `train`, those before a resume included.
            resume: go on from the run folder's last checkpoint, if there is one.
        """
        if epochs < 1:
            raise ValueError(f"epochs must be at least 1, got {epochs}")
        for stream in (train, *(() if valid is None else (valid,))):
            require_stream(stream)
        with self.folder.locked():
            here = self.ranks.leads and (self.folder.last(resume), str(self.folder.file("last")))
            saved, source = self.ranks.share(here)
            if saved is not None:
                snapshot.put_back(self, saved, train, source)
            self.folder.open(keep=0 if saved is None else saved["metrics_lines"])
            total = None if train.length is None else epochs * train.length
            self.scale = StepScale(self.optimizer, self.step_scale)
            self.optimizer.zero_grad()  # what was computed before is no part of the first update
            with (
                DeferredInterrupt() as interrupt,
                ProgressDisplay(total, self.tbptt.trained_steps, show=self.show) as display,
            ):
                warn_of_memory(self.tbptt, train)
                try:
                    stopped = self._run_epochs(train, valid, epochs, interrupt, display)
                finally:
                    self.scale.remove()
                    for logger in (self.folder, *self.loggers):
                        logger.close()
        return FitResult(self.epoch, stopped, self.best_epoch, self.best_loss, self.history)

    def evaluate(self, stream: Stream) -> float:
        """Return the mean loss of a stream at the present parameters; its rows are shared out."""
        shared = stream.rows >= self.ranks.count
        sums = evaluate_sum(
            self.tbptt.recurrent,
            self.loss_fn,
            self.ranks.deal(stream) if shared else stream,
            self.eval_chunk,
            self.tbptt.count_losses,
        )
        return mean_loss(*(self.ranks.total(sums) if shared else sums))

    def load_best(self) -> None:
        """Put the parameters with the lowest validation loss back, those of the loss too."""
        if self.best_state is None:
            raise TrainingError("there are no best parameters: no validation gave a finite loss")
        compiled.plain(self.model).load_state_dict(self.best_state)
        snapshot.load_loss(self, self.best_loss_states, "the best epoch")

    def _run_epochs(
        self,
        train: Stream,
        valid: Stream | None,
        epochs: int,
        interrupt: DeferredInterrupt,
        display: ProgressDisplay,
    ) -> Stopped:
        while self.epoch < epochs:
            waited = self.epoch - (self.best_epoch or 0)
            if valid is not None and self.patience is not None and waited >= self.patience:
                return "patience"
            if not self._run_windows(train, interrupt, display):
                return "time"
            self._end_epoch(train, valid, display)
            if self.ranks.any([interrupt.pending])[0]:  # in validation; the checkpoint is written
                raise KeyboardInterrupt
        return "epochs"

    def _run_windows(
        self, train: Stream, interrupt: DeferredInterrupt, display: ProgressDisplay
    ) -> bool:
        """Train from the stream's cursor to its end; return whether the end was reached."""
        self.model.train()
        began, before = self.clock(), self.seconds
        saved_at = began
        estimates = len(self.tbptt.history)
        for window in self.tbptt.windows(train):
            if len(self.tbptt.history) > estimates:
                estimates = len(self.tbptt.history)
                self._log_estimate()
            self._update(window)
            now = self.clock()
            self.seconds = before + now - began
            if self.meter.pending >= 100 or display.wants_update:
                self._check_losses()
                if display.wants_update:
                    display.update(self.tbptt.trained_steps, self._line())
            interrupted, late, due = self.ranks.any(
                [
                    interrupt.pending,
                    self.max_seconds is not None and self.seconds >= self.max_seconds,
                    now - saved_at >= self.checkpoint_seconds,
                ]
            )
            if interrupted or late or due:
                self._save(train)
                saved_at = now
            if interrupted:
                raise KeyboardInterrupt
            if late:
                return False
        return True

    def _update(self, window: Window) -> None:
        """One step: theta - gamma sqrt(K) g (Algorithm 1, lines 9 to 11)."""
        loss = window.backward()
        if self.clip is not None:
            self.clip(self.tbptt.parameters, window.losses)
        self.scale.step(window.losses)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        if self.scheduler is not None and self.scheduler_per == "window":
            self.scheduler.step()
        self.meter.add(loss, window.weight or 0.0, self.tbptt.trained_steps)

    def _end_epoch(self, train: Stream, valid: Stream | None, display: ProgressDisplay) -> None:
        self._check_losses()
        valid_loss = None
        if valid is not None:
            valid_loss = self.evaluate(valid)
            better = self.best_loss is None or valid_loss < self.best_loss
            if better and math.isfinite(valid_loss):
                self.best_loss, self.best_epoch = valid_loss, self.epoch + 1
                self.best_state = copy.deepcopy(compiled.plain(self.model).state_dict())
                self.best_loss_states = copy.deepcopy(snapshot.loss_states(self))
                self.folder.save("best", self.best_state)
        self.epoch += 1
        decision = self.tbptt.truncation.decision
        metrics: dict[str, Any] = {
            "event": "epoch",
            "epoch": self.epoch,
            "data_passes": None if train.length is None else self.tbptt.data_steps / train.length,
            "train_loss": self.meter.mean,
            "valid_loss": valid_loss,
            "k": self.tbptt.k,
            "beta": None if decision is None else decision.beta,
            "relative_bias": None if decision is None else decision.relative_bias,
            "updates": self.updates,
            "reach": list(self.tbptt.reach),
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "seconds": self.seconds,
        }
        for callback in self.callbacks:
            callback(self, metrics)
        metrics = plain(metrics)
        self.history.append(metrics)
        self._log(metrics)
        self.meter = LossMeter()
        if self.scheduler is not None and self.scheduler_per == "epoch":
            self._step_scheduler(metrics["train_loss"] if valid_loss is None else valid_loss)
        self._save(train)
        display.say(self._line(metrics))

    def _step_scheduler(self, loss: float) -> None:
        seen = (loss,) if isinstance(self.scheduler, ReduceLROnPlateau) else ()
        with warnings.catch_warnings():
            # torch warns of a scheduler that steps before its optimiser, which is what it sees
            # when a run is resumed at the very end of an epoch.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.scheduler.step(*seen)

    def _line(self, epoch: dict[str, Any] | None = None) -> str:
        numbers = epoch or {"epoch": self.epoch + 1, "train_loss": self.meter.mean}
        return describe(numbers, self.best_loss, self.tbptt.truncation)

    def _log_estimate(self) -> None:
        tbptt = self.tbptt
        latest, decision, profile = tbptt.history[-1], tbptt.truncation.decision, tbptt.profile
        assert decision is not None  # it made the estimate
        assert profile is not None  # from this
        norms = tbptt.controller.norms(tbptt.truncation, profile)
        self._log(
            {
                "event": "estimate",
                "epoch": self.epoch + 1,
                "k": latest.k,
                "beta": latest.beta,
                "relative_bias": latest.relative_bias,
                "outcome": latest.outcome,
                "delta": decision.delta,
                "tau": decision.tau,
                "decay": profile.brief(norms=norms),
            }
        )

    def _log(self, metrics: Metrics) -> None:
        for logger in (self.folder, *self.loggers):
            logger.log(metrics, self.tbptt.trained_steps)

    def _check_losses(self) -> None:
        bad = self.meter.flush()
        if bad is not None:
            step, value = bad
            raise TrainingError(
                f"the loss became {value} at data step {step}, in epoch {self.epoch + 1}; "
                f"try a smaller learning rate or clipping{self.folder.what_is_safe()}"
            )

    def _save(self, train: Stream) -> None:
        """Write a checkpoint, after making sure that there is something good to write."""
        self._check_losses()
        if not all(bool(torch.isfinite(p).all()) for p in self.tbptt.parameters):
            raise TrainingError(
                f"a parameter is NaN or infinite after data step {self.tbptt.trained_steps}, in "
                f"epoch {self.epoch + 1}{self.folder.what_is_safe()}"
            )
        self.folder.save("last", snapshot.take(self, train))
