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
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..data.stream import Stream, require_stream
from ..errors import CheckpointError, TrainingError
from ..loop.adaptive import AdaptiveTBPTT
from ..loop.clipping import Clip
from ..loop.evaluation import evaluate_sum, mean_loss
from ..loop.step_scale import Rule, StepScale, rule_for
from ..loop.window import Window
from . import training_state
from .interrupt import DeferredInterrupt
from .loggers import Logger, Metrics, plain
from .metrics import LossMean, epoch_metrics, estimate_metrics, known_rows
from .progress_display import ProgressDisplay, describe
from .run_folder import RunFolder

Callback = Callable[["Trainer", dict[str, Any]], None]
Stopped = Literal["epochs", "patience", "time"]

FLUSH_WINDOWS = 100  # windows between two checks of the loss, at most; arbitrary

# A GPU's allocator raises torch.OutOfMemoryError, a RuntimeError that says "out of memory". The
# CPU's raises a plain RuntimeError. Its message names the allocator, and says "not enough memory"
# or "can't allocate memory", depending on the platform.
OUT_OF_MEMORY = ("out of memory", "not enough memory", "DefaultCPUAllocator")


@dataclass(frozen=True)
class FitResult:
    """How a run ended.

    Attributes:
        epochs: epochs trained, those before a resume included.
        stopped: the budget that ended the run: 'epochs', 'patience' or 'time'.
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
        loggers: further objects that receive the metrics. One that fails is left out from then on.
        tensorboard: write scalars for TensorBoard; None does so where it is installed.
        callbacks: each is called as `callback(trainer, metrics)` after every epoch and may add to
            the metrics. What it adds is kept in `trainer.history`.
        show: whether to show progress on standard error.

    Attributes:
        model: the module that is trained.
        loss_fn: the loss of training and validation.
        ranks: the processes that train together.
        epoch: epochs trained so far.
        updates: optimiser steps so far.
        seconds: training time so far.
        history: the metrics of every epoch so far. `tbptt.history` holds every estimate of K.
        best_epoch: the epoch with the lowest validation loss; None before a finite one.
        best_loss: that loss.
        best_weights: state dicts of the model and the loss at the end of that epoch.
        train_loss: the mean training loss of the epoch under way.
        folder: the run folder.
        settings: what a checkpoint must agree with to be resumed.
        given: the optimiser's options as they were when the run began.

    >>> from adaptive_tbptt import AdaptiveTBPTT, FixedTruncation, SequenceStream
    >>> model, x = torch.nn.GRU(3, 3), torch.ones(60, 2, 3)
    >>> tbptt = AdaptiveTBPTT(model, torch.nn.MSELoss(), FixedTruncation(10))
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
        scheduler_per: Literal["epoch", "window"] = "epoch",
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
        if scheduler_per not in ("epoch", "window"):
            raise ValueError(f"scheduler_per must be 'epoch' or 'window', got {scheduler_per!r}")
        if scheduler_per == "window" and isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError(
                "ReduceLROnPlateau needs the validation loss, which comes once per epoch: use "
                "scheduler_per='epoch'"
            )
        if patience is not None and patience < 1:
            raise ValueError(f"patience must be at least 1 epoch, got {patience}")
        if eval_chunk < 1:
            raise ValueError(f"eval_chunk must be at least 1 step, got {eval_chunk}")
        known = set(tbptt.parameters)
        unsaved = [p for group in optimizer.param_groups for p in group["params"] if p not in known]
        if unsaved:
            raise ValueError(
                f"{len(unsaved)} of the optimiser's parameters belong neither to the model nor to "
                "the loss, so no checkpoint would hold them: make them part of one of the two"
            )
        if not tbptt.ranks.leads:
            run_dir, show, tensorboard, loggers = None, False, False, ()
        self.tbptt, self.optimizer = tbptt, optimizer
        self.model, self.loss_fn, self.ranks = tbptt.recurrent.module, tbptt.loss_fn, tbptt.ranks
        self.scheduler, self.scheduler_per = scheduler, scheduler_per
        self.step_scale, self.clip = rule_for(optimizer, step_scale), clip
        self.patience, self.max_seconds, self.clock = patience, max_seconds, clock
        self.checkpoint_seconds, self.eval_chunk, self.show = checkpoint_seconds, eval_chunk, show
        self.folder = RunFolder(run_dir)
        self.loggers = [*loggers, *self.folder.tensorboard(tensorboard)]
        self.callbacks = list(callbacks)
        self.settings = training_state.settings_of(self)
        self.given = training_state.options_of(optimizer)
        self.epoch, self.updates, self.seconds = 0, 0, 0.0
        self.history: list[dict[str, Any]] = []
        self.best_epoch: int | None = None
        self.best_loss: float | None = None
        self.best_weights: training_state.Weights = []
        self.train_loss = LossMean()

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
        require_stream(train)
        if valid is not None:
            require_stream(valid)
        with self.folder.locked():
            keep = self._resume(train, resume)
            self.folder.open(keep, known_rows(self) if keep else ())
            stopped = self._run_epochs(train, valid, epochs)
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
        if not self.best_weights:
            raise TrainingError("there are no best weights: no validation gave a finite loss")
        training_state.load_weights(self.tbptt, self.best_weights, "the best epoch")

    def _resume(self, train: Stream, resume: bool) -> int:
        """Load the last checkpoint, or write the first; return its lines of metrics."""
        # Only the first process has a run folder, so it reads for all of them.
        here = self.ranks.leads and (self.folder.last(resume), str(self.folder.file("last")))
        saved, source = self.ranks.share(here)
        if saved is None:
            self._save(train)  # from now on the folder holds a run
            return 0
        try:
            training_state.load_state_dict(self, train, saved, source)
            keep = int(saved["metrics_lines"])
        except (KeyError, IndexError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{source} does not hold a whole run ({type(error).__name__}: {error}): put a copy "
                "back in its place, or train again in another folder"
            ) from error
        if self.best_weights:  # the file may be missing or damaged
            self.folder.save("best", self.best_weights[0])
        return keep

    def _run_epochs(self, train: Stream, valid: Stream | None, epochs: int) -> Stopped:
        total = None if train.length is None else epochs * train.length
        self.scale = StepScale(self.optimizer, self.step_scale)
        self.optimizer.zero_grad()  # gradients from before are not part of the first update
        with (
            DeferredInterrupt() as interrupt,
            ProgressDisplay(total, self.tbptt.trained_steps, show=self.show) as display,
        ):
            try:
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
            finally:
                self.scale.remove()
                self.folder.close()
                self._tell("close")

    def _run_windows(
        self, train: Stream, interrupt: DeferredInterrupt, display: ProgressDisplay
    ) -> bool:
        """Train from the stream's cursor to its end; return False if the time ran out before."""
        tbptt = self.tbptt
        self.model.train()
        began, before = self.clock(), self.seconds
        saved_at = began
        estimates = len(tbptt.history)
        for window in tbptt.windows(train):
            if len(tbptt.history) > estimates:
                estimates = len(tbptt.history)
                self._log(estimate_metrics(self))
            self._update(window)
            now = self.clock()
            self.seconds = before + now - began
            if len(self.train_loss.pending) >= FLUSH_WINDOWS or display.wants_update:
                self._check_losses()
                if display.wants_update:
                    display.update(tbptt.trained_steps, self._line())
            # Saving is a collective call, so all processes must agree on whether to do it.
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
        """Take one step: theta - gamma sqrt(K2) g (Algorithm 1, lines 9 to 11)."""
        try:
            loss = window.backward()
        except RuntimeError as error:
            if not any(sign in str(error) for sign in OUT_OF_MEMORY):
                raise
            long = window.rated_losses < window.losses
            raise TrainingError(
                f"not enough memory for a window with K = {window.k} and {window.losses} losses, "
                f"in epoch {self.epoch + 1}: pass recompute=50, or lower "
                f"{'long_windows' if long else 'k_max (or the fixed K), losses'} or the batch "
                f"size{self.folder.what_is_safe()}"
            ) from error
        if self.clip is not None:
            self.clip(self.tbptt.parameters, window.rated_losses)
        self.scale.step(window)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        if self.scheduler is not None and self.scheduler_per == "window":
            self.scheduler.step()
        self.train_loss.pending.append((loss, window.weight or 0.0, self.tbptt.trained_steps))

    def _end_epoch(self, train: Stream, valid: Stream | None, display: ProgressDisplay) -> None:
        """Validate, keep the best weights, call back, log, step the scheduler, checkpoint."""
        self._check_losses()
        valid_loss = None if valid is None else self.evaluate(valid)
        self.epoch += 1
        best = math.inf if self.best_loss is None else self.best_loss
        # False for NaN and infinities: they must not become the best.
        if valid_loss is not None and -math.inf < valid_loss < best:
            self.best_epoch, self.best_loss = self.epoch, valid_loss
            self.best_weights = copy.deepcopy(training_state.weights_of(self.tbptt))
            self.folder.save("best", self.best_weights[0])
        metrics = epoch_metrics(self, train.length, valid_loss)
        for callback in self.callbacks:
            callback(self, metrics)
        metrics = plain(metrics)
        self.history.append(metrics)
        self._log(metrics)
        self.train_loss = LossMean()
        if self.scheduler is not None and self.scheduler_per == "epoch":
            self._step_scheduler(metrics["train_loss"] if valid_loss is None else valid_loss)
        self._save(train)
        display.say(self._line(metrics))

    def _step_scheduler(self, loss: float) -> None:
        with warnings.catch_warnings():
            # torch warns of a scheduler that steps before its optimiser. A run resumed at the very
            # end of an epoch looks like that, although the optimiser stepped before the resume.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            if isinstance(self.scheduler, ReduceLROnPlateau):
                self.scheduler.step(loss)
            else:
                self.scheduler.step()

    def _line(self, epoch: dict[str, Any] | None = None) -> str:
        numbers = epoch or {"epoch": self.epoch + 1, "train_loss": self.train_loss.mean}
        return describe(numbers, self.best_loss, self.tbptt.truncation)

    def _log(self, metrics: Metrics) -> None:
        self.folder.log(metrics, self.tbptt.trained_steps)
        self._tell("log", metrics, self.tbptt.trained_steps)

    def _tell(self, method: str, *args: Any) -> None:
        """Call a method of every further logger; one that fails is left out from then on."""
        for logger in list(self.loggers):
            try:
                getattr(logger, method)(*args)
            except Exception as error:
                self.loggers.remove(logger)
                warnings.warn(
                    f"{type(logger).__name__} failed and gets no more metrics "
                    f"({type(error).__name__}: {error}); training goes on",
                    stacklevel=2,
                )

    def _check_losses(self) -> None:
        bad = self.train_loss.flush()
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
        self.folder.save("last", training_state.state_dict(self, train))
