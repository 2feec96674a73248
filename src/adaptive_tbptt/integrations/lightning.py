"""Truncated backpropagation under Lightning's Trainer, which removed its own in 2.0.

Lightning hands over one batch at a time, and windows do not end where batches do. `training_step`
takes a batch as a chunk and runs every window whose losses have all arrived. Each window is one
optimiser step: a long chunk makes several, a chunk shorter than K may make none. The last batch of
an epoch also runs what is left. The gradients equal those of your own loop over the same chunks.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from .._torch.number_formats import flushed_denormals
from ..data.chunks import ChunkStream, shuffles
from ..data.segment import Segment, time_first
from ..loop.adaptive import AdaptiveTBPTT
from ..loop.clipping import Clip
from ..loop.step_scale import Rule, StepScale
from ..loop.window import Window
from ..measure.sampling import LevelRequest

try:
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.core.optimizer import LightningOptimizer
except ImportError as error:
    raise ImportError(
        "Lightning is not installed: pip install 'adaptive-tbptt[lightning]'"
    ) from error

KEY = "adaptive_tbptt"  # in Lightning's checkpoints


class Starved(Exception):
    """A window needs a chunk that Lightning has not handed over yet."""


class ChunkFeed(Iterator[Segment]):
    """The chunks of one epoch, as they come.

    Reading raises `Starved` if the next chunk has not come yet. This leaves the stream and its
    windows as they were, so you can ask for the same window again later.
    """

    def __init__(self) -> None:
        self.chunks: deque[Segment] = deque()
        self.closed = False

    def __next__(self) -> Segment:
        if self.chunks:
            return self.chunks.popleft()
        raise StopIteration if self.closed else Starved


class TBPTTModule(LightningModule):
    """A LightningModule trained with truncated backpropagation, K fixed or chosen from delta.

    Make it the base of your module, set `self.tbptt` and leave `training_step` out. The optimiser
    comes from `configure_optimizers` as usual. `tbptt` may hold a part of the module, or the module
    itself: `AdaptiveTBPTT(self, ...)`.

    Each batch of the training loader is `(inputs, targets)` or `(inputs, targets, resets)` in the
    layout of the model: time first, unless the model is `batch_first`. Override `chunk` for others.

    Args:
        carry: True if each batch continues the one before, row by row: the state is carried from
            batch to batch and reset at the start of an epoch. False if each batch holds sequences
            of its own, as with Lightning's `truncated_bptt_steps`: the state is reset for every
            batch, and no window crosses from one batch to the next.
        clip: gradient clipping. It sees unscaled gradients under every precision plugin. Lightning
            does not allow `Trainer(gradient_clip_val=...)` here.
        step_scale: how the rate follows the losses of a window, as the rule of `StepScale`. None
            follows the optimiser: 'sqrt' for SGD and ASGD, 'none' for all others.
        monitor: the logged metric that a `ReduceLROnPlateau` watches. Lightning ignores the one
            that `configure_optimizers` returns, because optimisation is manual here.
        args: for a further base class, with `kwargs`.
        kwargs: see `args`.

    Attributes:
        tbptt: yours to set; the windows to train on.
        automatic_optimization: False, since one batch may hold several optimiser steps.

    The module steps your schedulers: those with `"interval": "step"` after every window, all others
    after every epoch. It logs `train_loss` (the mean of the epoch), `k`, `beta` and
    `relative_bias`. `global_step` and `max_steps` count optimiser steps, that is windows. Without
    `estimate_every`, the module turns `estimates_per_epoch` into steps by assuming that every batch
    is as long as the first.

    Checkpoints hold K, its history and the carried state. A run resumed at the end of an epoch
    equals one that never stopped. So does one resumed inside an epoch, if the loader is resumable
    (has `state_dict` and `load_state_dict`). With any other loader Lightning reads the data from
    the first batch again, so the module resets the state too, and warns. Lightning does not save
    random states, so dropout differs after a resume.

    Call `super()` if you override `on_before_optimizer_step`, `on_train_epoch_end`,
    `on_save_checkpoint`, `on_load_checkpoint` or `configure_callbacks`.

    >>> from torch import nn
    >>> import adaptive_tbptt as at
    >>> class Mine(TBPTTModule):
    ...     def __init__(self):
    ...         super().__init__(clip=at.loop.Clip(1.0))
    ...         self.model = nn.GRU(3, 4)
    ...         controller = at.BiasTolerance(delta=0.1, k_max=50)
    ...         self.tbptt = at.AdaptiveTBPTT(self.model, nn.MSELoss(), controller)
    ...
    ...     def configure_optimizers(self):
    ...         return torch.optim.SGD(self.parameters(), lr=0.1)
    >>> Mine().automatic_optimization
    False
    """

    tbptt: AdaptiveTBPTT

    def __init__(
        self,
        *args: Any,
        carry: bool = True,
        clip: Clip | None = None,
        step_scale: Rule | None = None,
        monitor: str = "train_loss",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self.carry, self.clip, self.step_scale, self.monitor = carry, clip, step_scale, monitor
        self._open: tuple[ChunkFeed, ChunkStream] | None = None  # those of the present epoch
        self._saved_stream: dict[str, Any] | None = None  # from a checkpoint, until the next batch
        self._planned = False  # whether this module has set tbptt.estimate_every
        self._losses = 1  # K2 of the window whose step comes next, for clipping in a hook

    def chunk(self, batch: Any) -> Any:
        """Return a batch as `(inputs, targets)` or `(inputs, targets, resets)`."""
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        """Add a chunk and run the windows it completes; return their mean loss, if any."""
        optimizer = self.optimizers()
        if not isinstance(optimizer, LightningOptimizer):
            raise ValueError(
                "configure_optimizers must return one optimiser: use parameter groups for "
                "parameters with rates of their own"
            )
        chunk = self._as_segment(batch)
        feed, stream = self._feed_and_stream(batch_idx)
        self._plan_estimates(chunk.steps, batch_idx)
        feed.chunks.append(chunk)
        feed.closed = bool(self.trainer.is_last_batch) or not self.carry
        losses: list[Tensor] = []
        # For this call only: whatever else steps the optimiser must find no hooks on it.
        scale = StepScale(optimizer.optimizer, self.step_scale)
        try:
            with suppress(Starved):
                for window in self.tbptt.windows(stream):
                    losses.append(self._update(window, optimizer, scale))
                    if 0 <= self.trainer.max_steps <= self.trainer.global_step:
                        break
        finally:
            scale.remove()
        if feed.closed:  # the next batch begins a new epoch, or new sequences
            self._open = None
        if self.trainer.is_last_batch:
            self._step_schedulers("epoch", plateau=False)
        if not losses:
            return None
        self.log("k", float(self.tbptt.k or 0), prog_bar=True)
        decision = self.tbptt.truncation.decision
        if decision is not None:
            self.log_dict({"beta": decision.beta, "relative_bias": decision.relative_bias})
        return torch.stack(losses).mean()

    def _update(self, window: Window, optimizer: LightningOptimizer, scale: StepScale) -> Tensor:
        """Take one step: theta - gamma sqrt(K2) g (Algorithm 1, lines 9 to 11)."""
        with flushed_denormals():
            loss = window.loss()
            self.manual_backward(loss)
        self._losses = window.rated_losses
        scale.step(window)
        optimizer.step()
        optimizer.zero_grad()
        self._step_schedulers("step", plateau=False)
        self._step_schedulers("step", plateau=True)
        loss = loss.detach()
        if window.weight:  # the losses that the epoch's mean counts this window with
            size = max(1, round(window.weight))
            self.log(
                "train_loss", loss, prog_bar=True, on_step=False, on_epoch=True, batch_size=size
            )
        return loss

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Clip the gradients; precision plugins unscale them just before this hook."""
        super().on_before_optimizer_step(optimizer)
        if self.clip is None:
            return
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ValueError(
                f"a fused {type(optimizer).__name__} unscales the gradients inside its step, "
                "which is too late for clipping: use fused=False, or bf16-mixed"
            )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.clip(parameters, self._losses)

    def on_train_epoch_end(self) -> None:
        """Step a `ReduceLROnPlateau`, now that validation has run."""
        super().on_train_epoch_end()
        if not self.trainer.fit_loop.restarting:  # a loaded checkpoint brings no metrics
            self._step_schedulers("epoch", plateau=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add K, its history and the carried state; inside an epoch also the steps not yet used."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[KEY] = {
            "controller": repr(self.tbptt.controller),
            "tbptt": self.tbptt.state_dict(),
            "stream": None if self._open is None else self._open[1].state_dict(data=True),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load them, unless another controller made them."""
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint.get(KEY)
        if saved is None:
            return
        if saved["controller"] != repr(self.tbptt.controller):
            warnings.warn(
                f"the checkpoint was made with {saved['controller']}, so its K is not loaded: "
                f"{self.tbptt.controller!r} chooses a new one",
                stacklevel=2,
            )
            return
        self.tbptt.load_state_dict(saved["tbptt"])
        self._open, self._saved_stream = None, saved["stream"]

    def configure_callbacks(self) -> list[Callback]:
        """Check the settings of Lightning's Trainer; this is the first hook that it calls.

        Later, Lightning would refuse some of them itself, with an error about manual optimisation.
        """
        if self.trainer.state.fn == "fit":
            self._check_settings()
        callbacks = super().configure_callbacks()
        return list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]

    def _check_settings(self) -> None:
        trainer = self.trainer
        if trainer.gradient_clip_val:
            raise ValueError(
                f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) clips once per batch, but "
                "here a batch makes several steps: leave it out and pass "
                f"clip=Clip({trainer.gradient_clip_val}) to super().__init__ of your module"
            )
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                "Trainer(accumulate_grad_batches=...) counts batches, but here every window is a "
                "step: leave it out and pass losses= to AdaptiveTBPTT for larger windows"
            )
        if trainer.world_size > 1:
            raise ValueError(
                f"{trainer.world_size} processes would each choose their own K and wait for each "
                "other forever: use Trainer(devices=1)"
            )
        if not isinstance(getattr(self, "tbptt", None), AdaptiveTBPTT):
            raise ValueError(
                f"{type(self).__name__} has no tbptt: set self.tbptt = AdaptiveTBPTT(model, "
                "loss_fn, controller) in __init__"
            )

    def _as_segment(self, batch: Any) -> Segment:
        parts = self.chunk(batch)
        if not isinstance(parts, tuple | list) or len(parts) not in (2, 3):
            raise TypeError(
                "a batch must be (inputs, targets) or (inputs, targets, resets), got "
                f"{type(parts).__name__}: override chunk(batch) to return one of the two"
            )
        return time_first(*parts, batch_first=self.tbptt.recurrent.batch_first)

    def _feed_and_stream(self, batch_idx: int) -> tuple[ChunkFeed, ChunkStream]:
        """Return the feed that the next chunk belongs to, and the stream that reads it."""
        loader = self.trainer.train_dataloader
        if batch_idx == 0:
            if self.carry and isinstance(loader, DataLoader) and shuffles(loader):
                raise ValueError(
                    "the training loader shuffles: its batches do not continue each other, so "
                    "the state carried from one to the next would be wrong. Use shuffle=False, "
                    "or carry=False if each batch holds sequences of its own"
                )
            self._open = self._saved_stream = None
        saved, self._saved_stream = self._saved_stream, None
        if self._open is None:
            feed = ChunkFeed()
            self._open = feed, ChunkStream(feed)
            resumable = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
            if saved is not None and resumable:
                self._open[1].load_state_dict(saved)
            elif saved is not None:
                warnings.warn(
                    "resumed inside an epoch with a loader that is not resumable: Lightning reads "
                    "the data from the first batch again, so the state is reset. Checkpoint at the "
                    "end of an epoch, or use a loader with state_dict and load_state_dict",
                    stacklevel=2,
                )
        return self._open

    def _plan_estimates(self, steps: int, batch_idx: int) -> None:
        """Set `estimate_every` from `estimates_per_epoch`: a fed stream has no known length."""
        tbptt = self.tbptt
        due = tbptt.estimate_every is None or (self._planned and batch_idx == 0)
        if tbptt.request is None or not due:
            return
        if tbptt.estimates_per_epoch is None and isinstance(tbptt.request, LevelRequest):
            return  # these need no length
        batches = self.trainer.num_training_batches
        if math.isinf(batches):
            raise ValueError(
                "the loader has no length, so estimates_per_epoch cannot be turned into steps: "
                "pass estimate_every=, a number of steps, to AdaptiveTBPTT"
            )
        tbptt.estimate_every = tbptt.steps_between_estimates(int(batches * steps))
        self._planned = True

    def _step_schedulers(self, interval: str, *, plateau: bool) -> None:
        """Step those schedulers that watch a metric, or all others; Lightning steps none here."""
        done = self.trainer.global_step if interval == "step" else self.trainer.current_epoch + 1
        for config in self.trainer.lr_scheduler_configs:
            if config.interval != interval or done % config.frequency:
                continue
            if isinstance(config.scheduler, ReduceLROnPlateau) != plateau:
                continue
            metric = self.trainer.callback_metrics.get(self.monitor) if plateau else None
            if plateau and metric is None:
                raise ValueError(
                    f"ReduceLROnPlateau watches '{self.monitor}', which is not logged: pass "
                    "monitor= to super().__init__ of your module, one of "
                    f"{', '.join(sorted(self.trainer.callback_metrics))}"
                )
            self.lr_scheduler_step(config.scheduler, metric)
