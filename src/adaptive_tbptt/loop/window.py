"""One window of a stream: some context, then the steps that carry losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .._torch.denormals import flushed_denormals
from .._torch.number_formats import Scaler, no_autocast
from ..data.stream import Stream

if TYPE_CHECKING:
    from .adaptive import AdaptiveTBPTT


class Window:
    """K1 consecutive steps of the stream whose last K2 carry losses.

    Attributes:
        k: truncation length: every loss sees lags 0..k, as far as the stream has a past.
        start: first step of the window.
        first: first step that carries a loss.
        stop: the step after the last.
        losses: K2 as planned; the last window of an epoch may carry fewer.
        weight: number of losses it carried, once its loss was computed.
    """

    def __init__(
        self,
        owner: AdaptiveTBPTT,
        stream: Stream,
        k: int,
        start: int,
        first: int,
        stop: int,
        losses: int,
    ) -> None:
        self._owner, self._stream = owner, stream
        self.k, self.start, self.first, self.stop, self.losses = k, start, first, stop, losses
        self.weight: float | None = None

    @property
    def steps(self) -> int:
        """Number of steps that carry a loss."""
        return self.stop - self.first

    @property
    def reach(self) -> tuple[int, int]:
        """The largest lag that the first and the last loss of the window see."""
        return self.first - self.start, self.stop - 1 - self.start

    @property
    def progress(self) -> float | None:
        """Fraction of the epoch that is read after this window; None for unknown lengths."""
        length = self._stream.length
        return None if length is None else self.stop / length

    def loss(self) -> Tensor:
        """Run the window and return its mean loss, with the graph that `backward` needs."""
        if self.weight is not None:
            raise RuntimeError("a window is run once; the next one has moved the state on")
        return self._owner._run(self, self._stream)

    def backward(self, scale: float = 1.0, scaler: Scaler | None = None) -> Tensor:
        """Add the gradient of the window, times `scale`, to `.grad`; return the loss.

        To accumulate over n windows of equal size use `scale=1/n`. Under `torch.autocast` the
        forward pass is autocast, the backward pass follows it. A `scaler` (`torch.amp.GradScaler`)
        scales `.grad`, for its `unscale_` and `step`; the loss that is returned is not scaled.
        """
        with flushed_denormals():
            loss = self.loss()
            goal = loss * scale if scale != 1.0 else loss
            with no_autocast(loss.device):
                (goal if scaler is None else scaler.scale(goal)).backward()
        return self.average(loss.detach())

    def average(self, loss: Tensor) -> Tensor:
        """Average the gradient, and this window's loss, over all processes; return the loss.

        `backward` does so by itself. It is for those who call `loss().backward()`; in a single
        process there is nothing to do.
        """
        if self.weight is None:
            raise RuntimeError("a window is averaged after its backward pass")
        mean, self.weight = self._owner.ranks.average(
            self._owner.parameters, loss.detach(), self.weight
        )
        return mean
