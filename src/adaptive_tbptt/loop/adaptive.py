"""Truncated backpropagation in a person's own loop: windows of a stream, K chosen on the way."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.compiling import eager
from ..data.segment import slice_steps
from ..data.stream import Stream, require_stream
from ..distributed.ranks import Ranks, present_ranks
from ..errors import TruncationWarning
from ..estimate.lag_profile import LagProfile
from ..measure.lag_probe import probe_segment
from ..measure.sampling import alive_rows, check_reached, draw_segment
from ..model.losses import CountLosses, default_count, refuse_sums
from ..model.recurrent import LossFn, Recurrent, as_recurrent
from ..truncate.controller import Controller, TruncationState
from ..truncate.remedies import what_to_do
from .carried_states import Trajectory
from .estimates import Estimate
from .window import Window
from .window_pass import window_forward


class Windows:
    """The windows of one epoch, from the stream's cursor to its end. Iterate over it once."""

    def __init__(self, owner: AdaptiveTBPTT, stream: Stream) -> None:
        self._owner, self._stream = owner, stream

    def __len__(self) -> int:
        """Return how many windows are left if K stays what it is now.

        K changes on the way, so the number is a forecast. A scheduler that should follow the data
        rather than the number of updates is stepped by `window.progress`.
        """
        length, k = self._stream.length, self._owner.k
        if length is None or k is None:
            raise TypeError(
                "the number of windows is not known: the stream has no known length, or K was "
                "not estimated yet"
            )
        return math.ceil((length - self._stream.cursor) / self._owner.losses_per_window(k))

    def __iter__(self) -> Iterator[Window]:
        """Yield the windows; afterwards the stream is rewound."""
        return self._owner._epoch(self._stream)


class AdaptiveTBPTT:
    """Cuts a stream into windows, carries and detaches the state, re-estimates K on schedule.

    Args:
        model: any recurrent module; see `adaptive_tbptt.model`.
        loss_fn: `loss_fn(outputs, targets)`, a mean over time and batch.
        controller: `FixedTruncation`, `BiasTolerance`, or a wrapper around one.
        losses: K2, the steps of a window that carry a loss; None is `losses_per_k` times K. The
            window is K + K2 steps, so that every loss sees lags 0..K whatever K2 is.
        losses_per_k: K2 as a multiple of K, instead of `losses`; None is 1, the paper's choice.
        overlap: False leaves the context out: BPTT(K2, K2), as frameworks do it; the first loss of
            a window then sees lag 0 alone, and no bound holds.
        estimates_per_epoch: how often K is estimated (alpha in the paper).
        estimate_every: the same in steps; it is needed for streams whose length is not known.
        burn_in: steps that warm up the state before a probe's window; 20 as in the release.
        count_losses: `count_losses(targets)` counts the losses that targets hold, for masked
            losses. None counts every step of every row, less `loss_fn.ignore_index` where it has
            one.
        batch_first: layout of the model, as in `probe`; streams are time first.
        state_batch_dim: as in `probe`.
        seed: of the random segments that are probed.
        ranks: the processes that train together; None is all of torch.distributed where it is
            initialised. Each is given the whole stream and trains on its share of the rows;
            gradients, probes and K are those of all rows.

    Attributes:
        recurrent: the model as it is used here.
        control: what the controller has decided and remembers.
        history: every estimate of K so far.
        profile: what the last estimate measured; None before the first.
        trained_steps: steps of data trained on, over all epochs.
        probed_steps: steps of data probed.
        reach: the largest lag that the first and the last loss of the newest window saw.

    Choosing `losses`: larger costs less per loss, smaller updates more often. The paper uses K.

    >>> _ = torch.manual_seed(0)
    >>> from adaptive_tbptt import FixedTruncation, SequenceStream
    >>> model, stream = nn.RNN(3, 4), SequenceStream(torch.randn(50, 2, 3), torch.zeros(50, 2, 4))
    >>> tbptt = AdaptiveTBPTT(model, nn.functional.mse_loss, FixedTruncation(20))
    >>> for window in tbptt.windows(stream):
    ...     _ = window.backward()
    ...     print(window.start, window.first, window.stop)
    0 0 20
    0 20 40
    20 40 50
    """

    def __init__(
        self,
        model: nn.Module | Recurrent,
        loss_fn: LossFn,
        controller: Controller,
        *,
        losses: int | None = None,
        losses_per_k: float | None = None,
        overlap: bool = True,
        estimates_per_epoch: float = 1.0,
        estimate_every: int | None = None,
        burn_in: int = 20,
        count_losses: CountLosses | None = None,
        batch_first: bool | None = None,
        state_batch_dim: int | None = None,
        seed: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        check_losses(losses, losses_per_k)
        if estimates_per_epoch <= 0:
            raise ValueError(f"estimates_per_epoch must be positive, got {estimates_per_epoch}")
        if estimate_every is not None and estimate_every < 1:
            raise ValueError(f"estimate_every must be at least 1 step, got {estimate_every}")
        if burn_in < 0:
            raise ValueError(f"burn_in must not be negative, got {burn_in}")
        self.recurrent = as_recurrent(
            model, batch_first=batch_first, state_batch_dim=state_batch_dim
        )
        refuse_sums(loss_fn)
        self.ranks = present_ranks() if ranks is None else ranks
        self.loss_fn, self.controller = loss_fn, controller
        for module in self.modules:
            self.ranks.begin(module)
        self.losses, self.losses_per_k, self.overlap = losses, losses_per_k, overlap
        self.estimates_per_epoch, self.estimate_every = estimates_per_epoch, estimate_every
        self.burn_in = burn_in
        self.count_losses = default_count(loss_fn) if count_losses is None else count_losses
        self.truncation: TruncationState = controller.init()
        self.history: list[Estimate] = []
        self.trained_steps = 0
        self.probed_steps = 0
        self.profile: LagProfile | None = None
        self._since_estimate = 0
        self._trajectory = Trajectory()
        self._stream: weakref.ref[Stream] | None = None
        self.reach = (0, 0)
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def k(self) -> int | None:
        """The truncation length in use; None before the first estimate."""
        return self.truncation.k

    @property
    def modules(self) -> list[nn.Module]:
        """The model, and the loss where it is a module: it may have parameters of its own."""
        loss = [self.loss_fn] if isinstance(self.loss_fn, nn.Module) else []
        return [self.recurrent.module, *loss]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What training changes, each parameter once."""
        return list(dict.fromkeys(p for module in self.modules for p in module.parameters()))

    @property
    def data_steps(self) -> int:
        """Steps of data used so far, those that were probed included, as the paper counts."""
        return self.trained_steps + self.probed_steps

    def losses_per_window(self, k: int) -> int:
        """Return K2 for a truncation length."""
        if self.losses is not None:
            return self.losses
        return max(1, round((1.0 if self.losses_per_k is None else self.losses_per_k) * k))

    def windows(self, stream: Stream) -> Windows:
        """Return the windows of an epoch, from the stream's cursor on.

        A stream at its start begins from the initial state. One that was left or restored in the
        middle of an epoch goes on where it was.
        """
        require_stream(stream)
        return Windows(self, stream)

    def estimate(self, stream: Stream) -> LagProfile:
        """Probe random segments of the stream until the controller has chosen K."""
        steps = self.burn_in + self.controller.lags
        before, wants_more = self.truncation.decision, True
        while wants_more:
            self.profile = self._probe(self.ranks.deal(stream), steps)
            self.truncation = self.ranks.share(
                self.controller.update(self.truncation, self.profile)
            )
            self.probed_steps += steps
            wants_more = self.truncation.wants_more
        assert self.profile is not None
        self._since_estimate = 0
        decision = self.truncation.decision
        if decision is not None and self.truncation.k is not None:
            self.history.append(
                Estimate(
                    step=self.trained_steps,
                    k=self.truncation.k,
                    beta=decision.beta,
                    relative_bias=decision.relative_bias,
                    outcome=decision.outcome.name,
                    message=decision.message,
                )
            )
            news = before is None or before.outcome != decision.outcome
            concern = what_to_do(self.profile, decision) if news and self.ranks.leads else None
            if concern is not None:
                warnings.warn(concern, TruncationWarning, stacklevel=3)
        return self.profile

    def _probe(self, stream: Stream, steps: int) -> LagProfile:
        """Probe a random segment of every row, those of other processes included."""

        def count_all(targets: Any) -> float:
            return self.ranks.total([self.count_losses(targets)])[0]

        segment = draw_segment(stream, steps, count_all, self._generator)
        weight = self.count_losses(slice_steps(segment.targets, -1, None))
        profile = None
        if weight > 0:
            profile = probe_segment(
                self.recurrent,
                self.loss_fn,
                segment,
                burn_in=self.burn_in,
                sketch=self.controller.sketch,
                count_losses=self.count_losses,
            )
        alive = alive_rows(segment, self.count_losses, profile)
        whole, alive = self.ranks.join_profiles(profile, alive, weight)
        check_reached(whole, alive)
        return whole

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to go on exactly; take it after a window's `backward`.

        Where several processes train, all must ask for it. It is then that of a single process,
        and can be loaded by any number of them.
        """
        return {
            "control": self.truncation.to_dict(),
            "trajectory": self._trajectory.state_dict(self.ranks, self.recurrent),
            "history": [asdict(e) for e in self.history],
            "trained_steps": self.trained_steps,
            "probed_steps": self.probed_steps,
            "since_estimate": self._since_estimate,
            "reach": self.reach,
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from a saved state; the stream's own must be loaded too."""
        self.truncation = TruncationState.from_dict(saved["control"])
        self._trajectory.load_state_dict(saved["trajectory"])
        self.history = [Estimate(**e) for e in saved["history"]]
        self.trained_steps = saved["trained_steps"]
        self.probed_steps = saved["probed_steps"]
        self._since_estimate = saved["since_estimate"]
        self.reach = tuple(saved["reach"])
        self._stream = None
        self._generator.set_state(saved["generator"].cpu())

    def _epoch(self, whole: Stream) -> Iterator[Window]:
        same = self._stream is None or self._stream() is whole
        stream = self.ranks.deal(whole)
        if stream.cursor == 0 or self._trajectory.is_empty:
            self._trajectory.begin(stream.cursor)
        elif not same or self._trajectory.newest > stream.cursor:
            raise self._not_of(stream)
        self._stream = weakref.ref(whole)
        self._trajectory.open(self.recurrent, stream, self.ranks)
        if self.controller.lags:
            stream.reserve(self.burn_in + self.controller.lags)
        reach = self.controller.k_max if self.overlap else 0
        while True:
            # Before the estimate, not after the window: a run that was resumed holds the same then.
            self._trajectory.forget(max(stream.cursor - reach, 0))
            stream.forget(self._trajectory.oldest)
            if stream.available(stream.cursor + 1) == stream.cursor:
                break
            if self._stream is None or self._stream() is not whole:
                raise self._not_of(stream)
            if self._estimate_is_due(stream):
                self.estimate(stream)
            k = self.truncation.k
            assert k is not None
            first, losses = stream.cursor, self.losses_per_window(k)
            start = max(first - k, self._trajectory.oldest) if self.overlap else first
            stop = stream.available(first + losses)
            stream.cursor = stop  # before the yield: a checkpoint inside the loop goes on after it
            yield Window(self, stream, k, start, first, stop, losses)
        stream.rewind()

    def _not_of(self, stream: Stream) -> ValueError:
        return ValueError(
            f"the stream is at step {stream.cursor}, but the state that was carried here is of "
            "another stream, or of a later step: rewind() the stream, or use an AdaptiveTBPTT of "
            "its own for each"
        )

    def _run(self, window: Window, stream: Stream) -> Tensor:
        """Forward pass of a window; notes where the next ones may start."""
        state = self._trajectory.at(window.start, self.recurrent, stream)
        context = window.first - window.start
        # If K stays, the next window starts here; inside the context its state falls out.
        following = window.stop - (window.k if self.overlap else 0) - window.start
        marks = [following] if 0 < following < context else []
        # Only windows of full size repeat, so the others are not worth a compilation.
        full = window.steps == window.losses and context in (0, window.k)
        segment = stream.segment(window.start, window.stop)
        if self.ranks.count > 1:  # a checkpoint will join the rows of all
            self.recurrent.dims(self.recurrent.place(segment.inputs))
        with eager(not full):
            result = window_forward(
                self.recurrent, self.loss_fn, segment, state, context, self.count_losses, marks
            )
        for step, entering in result.states.items():
            self._trajectory.put(window.start + step, entering)
        window.weight = result.weight
        self.reach = window.reach
        self.trained_steps += window.steps
        self._since_estimate += window.steps
        return result.loss

    def _estimate_is_due(self, stream: Stream) -> bool:
        if self.controller.lags == 0:
            return False
        if self.truncation.k is None:
            return True
        every = self.estimate_every
        if every is None:
            if stream.length is None:
                raise ValueError(
                    "the length of the stream is not known, so estimates_per_epoch means "
                    "nothing: pass estimate_every=, a number of steps"
                )
            every = math.ceil(stream.length / self.estimates_per_epoch)
        return self._since_estimate >= every


def check_losses(losses: int | None, losses_per_k: float | None) -> None:
    """Refuse a number of losses per window that makes no sense."""
    if losses is not None and losses_per_k is not None:
        raise ValueError(
            "give losses (a number of steps) or losses_per_k (a multiple of K), not both"
        )
    if losses is not None and (isinstance(losses, bool) or not isinstance(losses, Integral)):
        raise TypeError(
            f"losses is a number of steps, got {losses!r}; a multiple of K is losses_per_k={losses!r}"
        )
    if losses is not None and losses < 1:
        raise ValueError(f"losses must be at least 1 step, got {losses}")
    if losses_per_k is not None and not losses_per_k > 0.0:
        raise ValueError(f"losses_per_k must be positive, got {losses_per_k}")
