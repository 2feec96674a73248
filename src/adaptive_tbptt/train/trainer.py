"""Algorithm 1 with what a long run needs: validation, checkpoints, budgets, progress, metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..data.stream import Stream, require_stream
from ..distributed.ranks import Ranks
from ..errors import TrainingError
from ..loop.adaptive import AdaptiveTBPTT
from ..loop.clipping import Clip
from ..loop.evaluation import evaluate_sum, mean_loss
from ..loop.step_scale import Rule, StepScale, rule_for
from ..loop.window import Window
from .fit_result import FitResult, Stopped
from .interrupt import DeferredInterrupt
from .loggers import Logger, Metrics, plain
from .loss_mean import LossMean
from .metrics import epoch_metrics, estimate_metrics
from .out_of_memory import is_out_of_memory
from .progress_display import ProgressDisplay, describe
from .run_folder import RunFolder
from .run_progress import BestEpoch, RunProgress
from .run_settings import require_same_settings, settings_of
from .scheduling import SchedulerPer, check_scheduler, step_after_epoch
from .training_state import TrainingState
from .weights import copy_weights, load_weights, refuse_unsaved_parameters

Callback = Callable[["Trainer", dict[str, Any]], None]

FLUSH_WINDOWS = 100  # windows between two checks of the loss, at most; arbitrary


class Trainer:
    """Train what an `AdaptiveTBPTT` holds: validate, checkpoint, resume, log, show progress.

    A resumed run equals one that never stopped, bit for bit. Ctrl-C and SIGTERM write a checkpoint
    and then raise `KeyboardInterrupt`. Where several processes train together (`tbptt.ranks`), the
    first of them writes the files and shows progress.

    Args:
        tbptt: the model, the loss, and how the stream is cut into windows.
        optimizer: any torch optimiser of the parameters of the model and of the loss.
        run_dir: folder for `metrics.jsonl` and `checkpoints/`; None writes nothing. Checkpoints
            need `pip install 'adaptive-tbptt[checkpoint]'`.
        scheduler: any torch scheduler. It sees the base rate, never the scaled one.
        scheduler_per: step the scheduler after every 'epoch', or after every 'window' for
            schedulers that count updates.
        step_scale: how the rate follows the losses of a window, as the rule of `StepScale`. None
            follows the optimiser: 'sqrt' for SGD and ASGD, 'none' for all others.
        clip: gradient clipping.
        patience: stop after this many epochs without a better validation loss.
        eval_chunk: steps that validation evaluates at a time; it bounds the memory.
        max_seconds: stop after this much training time, that before a resume included.
        checkpoint_seconds: time between checkpoints inside an epoch. The end of an epoch and a
            signal write one too.
        clock: returns the time in seconds.
        loggers: further objects that receive the metrics.
        tensorboard: write scalars for TensorBoard; None does so where it is installed.
        callbacks: each is called as `callback(trainer, metrics)` after every epoch and may add to
            the metrics. What it adds is kept in `trainer.history`.
        show: whether to show progress on standard error.

    Attributes:
        tbptt: as given; `tbptt.history` holds every estimate of K.
        progress: epochs, updates, seconds, metrics and the best epoch so far.
        folder: the run folder.
        settings: what a checkpoint must agree with to be resumed.

    >>> from adaptive_tbptt import AdaptiveTBPTT, FixedTruncation, SequenceStream
    >>> model, x = nn.GRU(3, 3), torch.ones(60, 2, 3)
    >>> tbptt = AdaptiveTBPTT(model, nn.MSELoss(), FixedTruncation(10))
    >>> trainer = Trainer(tbptt, torch.optim.SGD(model.parameters(), lr=0.1), show=False)
    >>> result = trainer.fit(SequenceStream(x, x), epochs=2)
    >>> result.stopped, result.epochs, trainer.updates
    ('epochs', 2, 12)
    """

    def __init__(
        self,
        tbptt: AdaptiveTBPTT,
        optimizer: Optimizer,
        *old_form: Any,
        run_dir: str | Path | None = None,
        scheduler: Any = None,
        scheduler_per: SchedulerPer = "epoch",
        step_scale: Rule | None = None,
        clip: Clip | None = None,
        patience: int | None = None,
        eval_chunk: int = 256,
        max_seconds: float | None = None,
        checkpoint_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        loggers: Sequence[Logger] = (),
        tensorboard: bool | None = None,
        callbacks: Sequence[Callback] = (),
        show: bool = True,
    ) -> None:
        # `old_form` catches Trainer(model, loss_fn, optimizer, controller), for which Python would
        # only say how many positional arguments there are.
        if old_form or not isinstance(tbptt, AdaptiveTBPTT):
            raise TypeError(
                f"Trainer takes an AdaptiveTBPTT and an optimiser, got {type(tbptt).__name__} "
                "first: write Trainer(AdaptiveTBPTT(model, loss_fn, controller), optimizer, ...)"
            )
        check_scheduler(scheduler, scheduler_per)
        if patience is not None and patience < 1:
            raise ValueError(f"patience must be at least 1 epoch, got {patience}")
        if eval_chunk < 1:
            raise ValueError(f"eval_chunk must be at least 1 step, got {eval_chunk}")
        refuse_unsaved_parameters(optimizer, tbptt.parameters)
        if not tbptt.ranks.leads:
            run_dir, show, tensorboard, loggers = None, False, False, ()
        self.tbptt, self.optimizer = tbptt, optimizer
        self.scheduler, self.scheduler_per = scheduler, scheduler_per
        self.step_scale, self.clip = rule_for(optimizer, step_scale), clip
        self.patience, self.max_seconds, self.clock = patience, max_seconds, clock
        self.checkpoint_seconds, self.eval_chunk, self.show = checkpoint_seconds, eval_chunk, show
        self.folder = RunFolder(run_dir)
        self.loggers = [*loggers, *self.folder.tensorboard(tensorboard)]
        self.callbacks = list(callbacks)
        self.settings = settings_of(tbptt, optimizer, scheduler, self.step_scale, clip)
        self.progress = RunProgress()

    @property
    def model(self) -> nn.Module:
        """The module that is trained."""
        return self.tbptt.recurrent.module

    @property
    def loss_fn(self) -> Callable[[Any, Any], Tensor]:
        """The loss of training and validation."""
        return self.tbptt.loss_fn

    @property
    def ranks(self) -> Ranks:
        """The processes that train together."""
        return self.tbptt.ranks

    @property
    def epoch(self) -> int:
        """Epochs trained so far."""
        return self.progress.epoch

    @property
    def updates(self) -> int:
        """Optimiser steps so far."""
        return self.progress.updates

    @property
    def history(self) -> list[dict[str, Any]]:
        """The metrics of every epoch so far."""
        return self.progress.history

    @property
    def best_epoch(self) -> int | None:
        """The epoch with the lowest validation loss; None before a finite one."""
        return None if self.progress.best is None else self.progress.best.epoch

    @property
    def best_loss(self) -> float | None:
        """The lowest validation loss; None before a finite one."""
        return None if self.progress.best is None else self.progress.best.loss

    def fit(
        self, train: Stream, valid: Stream | None = None, *, epochs: int, resume: bool = False
    ) -> FitResult:
        """Train until a budget is spent.

        Args:
            train: the training stream.
            valid: the validation stream. The weights with its lowest loss are kept for
                `load_best`.
            epochs: total number of passes over `train`, those before a resume included.
            resume: continue from the last checkpoint of the run folder, if there is one.
        """
        if epochs < 1:
            raise ValueError(f"epochs must be at least 1, got {epochs}")
        for stream in (train, *(() if valid is None else (valid,))):
            require_stream(stream)
        with self.folder.locked():
            self.folder.open(keep=self._resume(train, resume))
            total = None if train.length is None else epochs * train.length
            self.scale = StepScale(self.optimizer, self.step_scale)
            self.optimizer.zero_grad()  # gradients from before are not part of the first update
            with (
                DeferredInterrupt() as interrupt,
                ProgressDisplay(total, self.tbptt.trained_steps, show=self.show) as display,
            ):
                try:
                    stopped = self._run_epochs(train, valid, epochs, interrupt, display)
                finally:
                    self.scale.remove()
                    for logger in (self.folder, *self.loggers):
                        logger.close()
        return FitResult(self.epoch, stopped, self.best_epoch, self.best_loss, self.history)

    def evaluate(self, stream: Stream) -> float:
        """Return the mean loss of a stream with the present weights.

        Several processes share the rows, unless there are fewer rows than processes.
        """
        shared = stream.rows >= self.ranks.count
        part = self.ranks.deal(stream) if shared else stream
        sums = evaluate_sum(self.tbptt.objective, part, self.eval_chunk)
        return mean_loss(*(self.ranks.total(sums) if shared else sums))

    def load_best(self) -> None:
        """Load the weights with the lowest validation loss into the model and the loss."""
        if self.progress.best is None:
            raise TrainingError("there are no best weights: no validation gave a finite loss")
        load_weights(self.tbptt, self.progress.best.weights, "the best epoch")

    def _resume(self, train: Stream, resume: bool) -> int:
        """Load the last checkpoint, if there is one to resume; return its lines of metrics."""
        # Only the first process has a run folder, so it reads for all of them.
        here = self.ranks.leads and (self.folder.last(resume), str(self.folder.file("last")))
        saved, source = self.ranks.share(here)
        if saved is None:
            return 0
        require_same_settings(saved["settings"], self.settings, source)
        self._state(train).load_state_dict(saved, source)
        return int(saved["metrics_lines"])

    def _state(self, train: Stream) -> TrainingState:
        return TrainingState(self.tbptt, self.optimizer, self.scheduler, train, self.progress)

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
            # A signal during validation: the end of the epoch has written a checkpoint.
            if self.ranks.any([interrupt.pending])[0]:
                raise KeyboardInterrupt
        return "epochs"

    def _run_windows(
        self, train: Stream, interrupt: DeferredInterrupt, display: ProgressDisplay
    ) -> bool:
        """Train from the stream's cursor to its end; return False if the time ran out before."""
        progress, tbptt = self.progress, self.tbptt
        self.model.train()
        began, before = self.clock(), progress.seconds
        saved_at = began
        estimates = len(tbptt.history)
        for window in tbptt.windows(train):
            if len(tbptt.history) > estimates:
                estimates = len(tbptt.history)
                self._log(estimate_metrics(tbptt, self.epoch + 1))
            self._update(window)
            now = self.clock()
            progress.seconds = before + now - began
            if progress.loss.pending >= FLUSH_WINDOWS or display.wants_update:
                self._check_losses()
                if display.wants_update:
                    display.update(tbptt.trained_steps, self._line())
            # Saving is a collective call, so all processes must agree on whether to do it.
            interrupted, late, due = self.ranks.any(
                [
                    interrupt.pending,
                    self.max_seconds is not None and progress.seconds >= self.max_seconds,
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
        """Take one step: theta - gamma sqrt(K2) g (Algorithm 1, lines 9 to 11)."""
        loss = self._backward(window)
        if self.clip is not None:
            self.clip(self.tbptt.parameters, window.losses)
        self.scale.step(window)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress.updates += 1
        if self.scheduler is not None and self.scheduler_per == "window":
            self.scheduler.step()
        self.progress.loss.add(loss, window.weight or 0.0, self.tbptt.trained_steps)

    def _backward(self, window: Window) -> Tensor:
        try:
            return window.backward()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingError(
                f"not enough memory for a window with K = {window.k} and {window.losses} losses, "
                f"in epoch {self.epoch + 1}: lower k_max (or the fixed K), losses or the batch "
                f"size{self.folder.what_is_safe()}"
            ) from error

    def _end_epoch(self, train: Stream, valid: Stream | None, display: ProgressDisplay) -> None:
        """Validate, keep the best weights, call back, log, step the scheduler, checkpoint."""
        self._check_losses()
        progress = self.progress
        valid_loss = None if valid is None else self.evaluate(valid)
        progress.epoch += 1
        best = progress.best
        # A NaN must not become the best: no later loss would be smaller.
        if (
            valid_loss is not None
            and math.isfinite(valid_loss)
            and (best is None or valid_loss < best.loss)
        ):
            progress.best = BestEpoch(progress.epoch, valid_loss, copy_weights(self.tbptt))
            self.folder.save("best", progress.best.weights.model)
        metrics = epoch_metrics(
            self.tbptt,
            progress,
            length=train.length,
            valid_loss=valid_loss,
            lr=float(self.optimizer.param_groups[0]["lr"]),
        )
        for callback in self.callbacks:
            callback(self, metrics)
        metrics = plain(metrics)
        progress.history.append(metrics)
        self._log(metrics)
        progress.loss = LossMean()
        if self.scheduler is not None and self.scheduler_per == "epoch":
            loss = metrics["train_loss"] if valid_loss is None else valid_loss
            step_after_epoch(self.scheduler, loss)
        self._save(train)
        display.say(self._line(metrics))

    def _line(self, epoch: dict[str, Any] | None = None) -> str:
        numbers = epoch or {"epoch": self.epoch + 1, "train_loss": self.progress.loss.mean}
        return describe(numbers, self.best_loss, self.tbptt.truncation)

    def _log(self, metrics: Metrics) -> None:
        for logger in (self.folder, *self.loggers):
            logger.log(metrics, self.tbptt.trained_steps)

    def _check_losses(self) -> None:
        bad = self.progress.loss.flush()
        if bad is not None:
            step, value = bad
            raise TrainingError(
                f"the loss became {value} at data step {step}, in epoch {self.epoch + 1}: try a "
                f"smaller learning rate, or clipping{self.folder.what_is_safe()}"
            )

    def _save(self, train: Stream) -> None:
        """Write a checkpoint; refuse to replace a good one by weights that are not finite."""
        self._check_losses()
        if not all(bool(torch.isfinite(p).all()) for p in self.tbptt.parameters):
            raise TrainingError(
                f"a parameter is NaN or infinite after data step {self.tbptt.trained_steps}, in "
                f"epoch {self.epoch + 1}{self.folder.what_is_safe()}"
            )
        state = self._state(train).state_dict()
        lines = self.folder.lines
        self.folder.save("last", {"settings": self.settings, **state, "metrics_lines": lines})
