"""One window of a stream: some context, then the steps that carry losses."""

from __future__ import annotations

import math
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch.compiling import eager
from .._torch.number_formats import Scaler, flushed_denormals, no_autocast
from ..data.segment import Segment
from ..data.stream import Stream
from ..distributed.ranks import Ranks
from ..model.objective import Objective
from .carried_states import CarriedStates
from .long_windows import LongWindows
from .loss_trend import LossTrend
from .window_pass import Recompute, WindowPass, window_forward


class Span(NamedTuple):
    """Where a window lies.

    Attributes:
        k: truncation length: every loss sees lags 0..k, as far as the stream has a past.
        start: first step of the window.
        first: first step that carries a loss.
        stop: the step after the last.
        planned: K2 as planned; the last window of an epoch may carry fewer.
        following: where the next window starts if K stays.
        usual: K2 of a window that is none of `LongWindows`.
        factors: by step of the stream, the factor on the gradient of the state there.
    """

    k: int
    start: int
    first: int
    stop: int
    planned: int
    following: int
    usual: int
    factors: dict[int, float] = {}  # noqa: RUF012 - never written to


@dataclass
class Tally:
    """Counters that the windows of a loop share.

    Attributes:
        trained: steps of data trained on, over all epochs.
        since_estimate: the same since the last estimate of K.
        reach: the largest lag that the first and the last loss of the newest window saw.
        warned: whether a NaN loss was reported.
        trend: whether the loss of usual windows still falls.
        long: which windows are long.
        joins: whether outputs of pieces can be joined; None until a window asked.
    """

    trained: int = 0
    since_estimate: int = 0
    reach: tuple[int, int] = (0, 0)
    warned: bool = False
    trend: LossTrend = field(default_factory=LossTrend)
    long: LongWindows = field(default_factory=lambda: LongWindows(0))
    joins: bool | None = None


class Window:
    """K1 consecutive steps of the stream whose last K2 carry losses.

    A window runs once, from the state that the windows before it carried to its start, and leaves
    the states that the next ones start from. It counts as trained on once `backward`, or `loss`,
    has returned. If you leave the loop before, by an exception or a break, the next loop over the
    stream begins with this window.

    Attributes:
        k: truncation length: every loss sees lags 0..k, as far as the stream has a past. With
            `overlap=False` see `reach` instead.
        start: first step of the window.
        first: first step that carries a loss.
        stop: the step after the last.
        losses: K2, the steps that carry a loss; the last window of an epoch may have fewer.
        steps: the same as `losses`.
        reach: the largest lag that the first and the last loss of the window see.
        factors: by step of the stream, the factor on the gradient of the state there; empty unless
            the truncation is `Unbiased`.
        rated_losses: losses that the rate and the clipping follow: those of the window, and at most
            those of a usual window, since one of the long windows takes no longer step.
        weight: number of unmasked losses; None until the loss is computed.
    """

    def __init__(
        self,
        span: Span,
        objective: Objective,
        stream: Stream,
        carried: CarriedStates,
        tally: Tally,
        ranks: Ranks,
        recompute: int | None = None,
    ) -> None:
        self.k, self.start, self.first, self.stop = span[:4]
        self._planned, self._following, usual, self.factors = span[4:]
        self.losses = self.steps = self.stop - self.first
        self.rated_losses, self._long = min(self.losses, usual), self._planned > usual
        self.reach = self.first - self.start, self.stop - 1 - self.start
        self.weight: float | None = None
        self._objective, self._stream, self._ranks = objective, stream, ranks
        self._carried, self._tally, self._recompute = carried, tally, recompute
        self._passed = False

    @property
    def progress(self) -> float | None:
        """Fraction of the epoch read after this window; None if the length is unknown."""
        length = self._stream.length
        return None if length is None else self.stop / length

    def pass_on(self) -> None:
        """Let the next window have its turn; say so if another loop has moved the stream."""
        expected = self.first if self.weight is None else self.stop
        if self._stream.cursor != expected:
            raise ValueError(
                f"this loop left the stream at step {expected} and finds it at step "
                f"{self._stream.cursor}: another loop reads the same stream, so each would skip "
                "data. Give every loop a stream of its own"
            )
        self._passed, self._stream.cursor = True, self.stop

    def loss(self) -> Tensor:
        """Run the window and return its mean loss, with the graph that `backward` needs."""
        result = self._run()
        self._finish(result)
        return result.loss

    def _run(self) -> WindowPass:
        if self.weight is not None:
            raise RuntimeError("a window runs only once: the carried state has moved on")
        recurrent = self._objective.recurrent
        self._stream.available(self.stop)  # an evaluation in between may have let go of it
        state = self._carried.at(self.start, recurrent, self._stream)
        segment = self._stream.segment(self.start, self.stop)
        context = self.first - self.start
        if self._ranks.count > 1 or self._recompute is not None:
            # The layout: checkpoints join the rows of all processes by it, windows their pieces.
            recurrent.dims(recurrent.place(segment.inputs))
        # Only windows of full size repeat; the others are not worth a compilation.
        full = self.steps == self._planned and context in (0, self.k)
        forward = window_forward if full else eager()(window_forward)
        factors = {step - self.start: factor for step, factor in self.factors.items()}
        marks = self._marks(context, segment)
        again = None if self._recompute is None else Recompute(self._recompute, not full)
        return forward(self._objective, segment, state, context, marks, factors, again)

    def _finish(self, result: WindowPass) -> None:
        """Carry the states on and count the steps; a window that fails before stays the next."""
        for step, entering in result.states.items():
            self._carried.put(self.start + step, entering)
        self.weight = result.losses
        self._tally.reach = self.reach
        self._tally.trained += self.steps
        self._tally.since_estimate += self.steps
        if not self._passed:
            self._stream.cursor = self.stop
        if self._ranks.count == 1:
            self._note(result.loss)

    def _note(self, loss: Tensor) -> None:
        """Tell the trend, and which windows are to be long; on all processes the same."""
        assert self.weight is not None
        tally = self._tally
        if self.weight > 0 and not self._long:
            tally.trend.add(loss)
        tally.long.note(self.steps, self._long, bool(tally.trend.stalled))

    def _marks(self, context: int, segment: Segment) -> list[int]:
        """Return the step where the next window starts, so that its state is held."""
        following = self._following - self.start
        if context < following < segment.steps:
            return [following] if self._joins(segment) else []
        return [following] if 0 < following < context else []

    def _joins(self, segment: Segment) -> bool:
        """Return whether the losses may be cut: outputs that do not join lose their common loss."""
        if self._tally.joins is None:
            recurrent = self._objective.recurrent
            with suppress(Exception):  # advisory: the model cannot be called this way
                recurrent.dims(recurrent.place(segment.inputs))
            self._tally.joins = bool(recurrent.joins)
        return self._tally.joins

    def backward(self, scale: float = 1.0, scaler: Scaler | None = None) -> Tensor:
        """Add the gradient of the window, times `scale`, to `.grad`; return the loss.

        To accumulate over n windows of equal size, use `scale=1/n`. Under `torch.autocast` only the
        forward pass is autocast; the backward pass follows its formats. A `scaler`
        (`torch.amp.GradScaler`) scales `.grad`, but not the loss returned.
        """
        with flushed_denormals():
            result = self._run()
            loss = result.loss
            self._warn_of_nan(loss)
            goal = loss * scale if scale != 1.0 else loss
            with no_autocast(loss.device):
                (goal if scaler is None else scaler.scale(goal)).backward()
        self._finish(result)
        return self.average(loss)

    def _warn_of_nan(self, loss: Tensor) -> None:
        """Warn once of a NaN loss; on an accelerator, reading it would make every window wait."""
        if loss.device.type != "cpu" or self._tally.warned or not math.isnan(loss.item()):
            return
        self._tally.warned = True
        warnings.warn(
            f"the loss of steps {self.first} to {self.stop} is NaN. If loss_fn ignores all of "
            "their targets, such as padding, pass a count_losses= that returns 0 for them",
            UserWarning,
            stacklevel=3,
        )

    def average(self, loss: Tensor) -> Tensor:
        """Average the gradient, and this window's loss, over all processes; return the loss.

        `backward` calls it. Call it yourself after `loss().backward()`, if several processes train.
        """
        if self.weight is None:
            raise RuntimeError("call loss().backward() of this window before average")
        loss = loss.detach()
        if self._ranks.count > 1:
            parameters = self._objective.parameters
            # The same format on all ranks, so that they agree about the trend. A rank whose rows
            # are all masked may have a loss in the format of its state.
            loss = loss if loss.dtype == torch.float64 else loss.float()
            loss, self.weight = self._ranks.average(parameters, loss, self.weight)
            self._note(loss)
        return loss
