"""Truncated backpropagation in your own loop: windows of a stream, K chosen on the way."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .. import defaults
from ..data.stream import Stream, require_stream
from ..distributed.ranks import Ranks, present_ranks
from ..errors import TruncationWarning
from ..measure.fused_layer import ProbePlan
from ..measure.sampling import Evidence, LevelRequest, Request, Source
from ..model.checks import look
from ..model.objective import CountLosses, Objective
from ..model.recurrent import LossFn, Recurrent
from ..truncate.controller import Controller, TruncationState
from ..truncate.remedies import what_to_do
from .arguments import (
    as_controller,
    check_controller,
    check_long_windows,
    check_losses,
    check_recompute,
)
from .carried_states import CarriedStates, start_state
from .epoch import Windows
from .estimates import Estimate, pack_history, unpack_history
from .long_windows import LongWindows
from .schedule import SoFar, check_schedule, count_confirmed, steps_between
from .window import Span, Tally, Window

LOOK_STEPS = 64  # arbitrary: enough to meet a mask or a sequence's end, cheap beside an epoch


class AdaptiveTBPTT:
    """Cuts a stream into windows, carries and detaches the state, re-estimates K on schedule.

    Args:
        model: any recurrent module; see `adaptive_tbptt.model`.
        loss_fn: `loss_fn(outputs, targets)`, called once for all losses of a window. Any scalar
            but a sum over steps: a mean, or a loss that is normalised over the window.
        controller: how to truncate. None is the recommended way: a detach loop that chooses the
            length of its windows, twice the smallest K with an estimated bias of at most 0.2
            (`BestGuess`), and at least 20. Once the training loss has stalled, long windows are
            among them. A whole number is `FixedTruncation(k)`, a fraction `BiasTolerance(delta)`.
        losses: K2, the steps of a window that carry a loss; None is `losses_per_k` times K, and 20
            in the recommended loop. With `overlap` the window is K + K2 steps, so that every loss
            sees lags 0..K whatever K2 is.
        losses_per_k: K2 as a multiple of K; None is 1, the paper's choice, unless you pass
            `losses`, and 2 in the recommended loop. With both, K2 is the larger of the two.
        overlap: False leaves the context out: BPTT(K2, K2), as frameworks do it. The first loss of
            a window then sees lag 0 alone, and no bound holds. None is True, and False in the
            recommended loop.
        estimates_per_epoch: how often to estimate K (alpha in the paper). None is once with the
            paper's gauges. `MeasuredGauge` estimates again each time that the trained steps have
            grown by 5 %. After the first, estimates read at most 5 % as many steps as training.
            The recommended loop waits up to four times as long while estimates change nothing.
        estimate_every: steps between estimates; the paper's gauges need it if the stream's length
            is unknown.
        burn_in: steps that warm up the state before a measurement; 20 as in the release.
        count_losses: `count_losses(targets)` counts the unmasked losses in targets. None counts
            every step of every row, minus targets equal to `loss_fn.ignore_index`.
        batch_first: layout of the model, as in `probe`; streams are time first.
        state_batch_dim: as in `probe`.
        seed: of the random segments to measure on.
        ranks: the processes that train together; None is all of torch.distributed if it is
            initialised. Pass each the whole stream: it trains on its share of the rows, while
            gradients, probes and K are those of all rows.
        long_windows: losses of the long windows that take half of the steps once the training loss
            has stalled; 0 for none. None is 0, and 160 in the recommended loop.
        recompute: the most steps of a window to hold in memory for the backward pass; it runs the
            others again, some steps at a time. None holds the whole window.

    Attributes:
        objective: model and loss.
        truncation: the state of the controller.
        history: every estimate of K so far.
        evidence: what the last estimate measured; None before the first.
        probed_steps: steps of data that estimates measured on.

    Choosing `losses`: larger costs less per loss, smaller updates more often. The paper uses K.
    With context, as many losses as steps of context keep its cost at a factor of two.

    Choosing `recompute`: leave it out unless memory runs out. It costs at most one more forward
    pass, whatever the number. A small number holds few steps, but keeps a state per piece; 10 to 50
    suits windows of thousands of steps. `diagnose(...).longest_window(gigabytes, recompute)`
    forecasts how long a window fits. Dropout draws the same masks again.

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
        controller: Controller | float | None = None,
        *,
        losses: int | None = None,
        losses_per_k: float | None = None,
        overlap: bool | None = None,
        estimates_per_epoch: float | None = None,
        estimate_every: int | None = None,
        burn_in: int = defaults.BURN_IN,
        count_losses: CountLosses | None = None,
        batch_first: bool | None = None,
        state_batch_dim: int | None = None,
        seed: int = 0,
        ranks: Ranks | None = None,
        long_windows: int | None = None,
        recompute: int | None = None,
    ) -> None:
        if controller is None:
            losses = defaults.UPDATE_LOSSES if losses is None else losses
            losses_per_k = defaults.UPDATE_LOSSES_PER_K if losses_per_k is None else losses_per_k
            overlap = bool(overlap)
            long_windows = defaults.LONG_WINDOWS if long_windows is None else long_windows
        check_losses(losses, losses_per_k)
        check_schedule(estimates_per_epoch, estimate_every, burn_in)
        check_long_windows(long_windows)
        check_recompute(recompute)
        self.objective = Objective.of(
            model,
            loss_fn,
            count_losses,
            batch_first=batch_first,
            state_batch_dim=state_batch_dim,
        )
        self.controller, self._recommended = as_controller(controller), controller is None
        overlap = overlap is None or overlap
        check_controller(self.controller, losses, overlap)
        self.ranks = present_ranks() if ranks is None else ranks
        for module in self.objective.modules:
            self.ranks.begin(module)
        self.losses, self.losses_per_k, self.overlap = losses, losses_per_k, overlap
        self.estimates_per_epoch, self.estimate_every = estimates_per_epoch, estimate_every
        self.burn_in, self.recompute = burn_in, recompute
        self.long_windows = long_windows or 0
        self.truncation: TruncationState = self.controller.init()
        self.history: list[Estimate] = []
        self._outcomes: set[str] = set()  # those in the history: each is warned of once
        self.evidence: Evidence | None = None
        self.probed_steps = 0
        self._tally = Tally(long=LongWindows(self.long_windows))
        self._carried = CarriedStates()
        self._wait: int | None = None  # steps to the next estimate
        self._plan, self._prepared = ProbePlan(), False
        self._stream: weakref.ref[Stream] | None = None
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def recurrent(self) -> Recurrent:
        """The wrapped model."""
        return self.objective.recurrent

    @property
    def loss_fn(self) -> LossFn:
        """The loss."""
        return self.objective.loss_fn

    @property
    def count_losses(self) -> CountLosses:
        """The rule that counts the losses in targets."""
        return self.objective.count_losses

    @property
    def modules(self) -> list[nn.Module]:
        """The model, and the loss if it is a module: it may have parameters of its own."""
        return self.objective.modules

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of model and loss, each once."""
        return self.objective.parameters

    @property
    def trained_steps(self) -> int:
        """Steps of data trained on, over all epochs."""
        return self._tally.trained

    @property
    def reach(self) -> tuple[int, int]:
        """The largest lag that the first and the last loss of the newest window saw."""
        return self._tally.reach

    @property
    def k(self) -> int | None:
        """The truncation length in use; None before the first estimate."""
        return self.truncation.k

    @property
    def data_steps(self) -> int:
        """Steps of data used so far, probed steps included, as the paper counts."""
        return self.trained_steps + self.probed_steps

    def losses_per_window(self, k: int) -> int:
        """Return K2 for a truncation length."""
        least = 1 if self.losses is None else self.losses
        if self.losses_per_k is None:
            return least if self.losses is not None else max(1, k)
        return max(least, round(self.losses_per_k * k))

    def windows(self, stream: Stream) -> Windows:
        """Return the windows of an epoch, from the stream's cursor on.

        A stream at its start begins from its `state`, or from the initial one. A stream in the
        middle of an epoch continues with the carried state. Any stream at its start will do: an
        agent trains on a new one for every rollout or every batch of a replay buffer.
        """
        require_stream(stream)
        return Windows(self, stream)

    def prepare(self, stream: Stream) -> None:
        """Check the library's assumptions once on the first steps, and choose the probe's path.

        A run resumed from a checkpoint was checked when it began.
        """
        part = self.ranks.deal(stream)
        if self._prepared or self.trained_steps or part.available(part.cursor + 1) == part.cursor:
            return
        self._prepared = True
        segment = part.peek(LOOK_STEPS)
        look(self.objective, segment, part, mean=self._needs_mean())
        if self.request is not None:
            self.request.prepare(self.objective, segment, self._plan)

    def _needs_mean(self) -> str | None:
        """Say why the loss must be a mean over time and batch; None if it need not be."""
        if self.ranks.count > 1:
            return "Every process applies it to rows of its own"
        if self.request is not None and self.request.losses == 1 and self.losses != 1:
            return "Estimates of K measure single steps: pass losses=, and use MeasuredGauge"
        return None

    @property
    def request(self) -> Request | None:
        """What the next estimate will measure; None if K is fixed."""
        return self.controller.request(self.truncation, self.losses)

    def estimate(self, stream: Stream) -> Evidence | None:
        """Measure on random segments of the stream and let the controller choose K.

        The recommended controller measures fewer lags on a short stream, and returns None if it is
        too short for any.
        """
        request = self.request
        if request is None:
            raise ValueError(f"{self.controller} never estimates: K is fixed")
        source = Source(
            self.objective,
            self.ranks.deal(stream),
            self.burn_in,
            self._generator,
            processes=self.ranks if self.ranks.count > 1 else None,
            plan=self._plan,
        )
        if self._recommended and isinstance(request, LevelRequest):
            # Nobody asked for so many lags: measure those that the data have.
            request = request.within(self._room(source.stream, request) - source.warm_up_steps)
            if request is None:
                self._tally.since_estimate, self._wait = 0, None
                return None
        evidence = request.measure(source)
        self.evidence = evidence
        self.truncation = self.ranks.share(self.controller.update(self.truncation, evidence))
        self.probed_steps += request.batches * (source.warm_up_steps + request.steps)
        self._tally.since_estimate, self._wait = 0, None
        estimate = Estimate.of(self.truncation, self.trained_steps)
        if estimate is None:
            return evidence
        self.history.append(estimate)
        decision, news = self.truncation.decision, estimate.outcome not in self._outcomes
        self._outcomes.add(estimate.outcome)
        if decision is not None and news and self.ranks.leads:
            concern = what_to_do(evidence, decision)
            if concern is not None:
                warnings.warn(concern, TruncationWarning, stacklevel=3)
        return evidence

    def _room(self, stream: Stream, request: LevelRequest) -> int:
        """Return how many steps a random segment may have."""
        if stream.length is not None:
            return stream.length
        first = self._carried.oldest
        needed = max(self.burn_in, stream.burn_in) + request.steps
        return max(stream.available(first + needed) - first, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume exactly; call it after a window's `backward`.

        If several processes train, all must call it. The result holds the rows of all processes,
        and any number of processes can load it.
        """
        return {
            "control": self.truncation.to_dict(),
            "trajectory": self._carried.state_dict(self.ranks, self.recurrent),
            "history": pack_history(self.history),
            "trained_steps": self.trained_steps,
            "probed_steps": self.probed_steps,
            "since_estimate": self._tally.since_estimate,
            "reach": self.reach,
            "trend": self._tally.trend.state_dict(),
            "long_windows": [self._tally.long.begun, self._tally.long.owed],
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Resume from a saved state; load that of the stream too."""
        self.truncation = TruncationState.from_dict(saved["control"])
        self._carried.load_state_dict(saved["trajectory"])
        self.history = unpack_history(saved["history"])
        self._outcomes = {e.outcome for e in self.history}
        self._tally = Tally(saved["trained_steps"], saved["since_estimate"], tuple(saved["reach"]))
        self._tally.long = LongWindows(self.long_windows, *saved.get("long_windows", []))
        if "trend" in saved:  # older checkpoints have neither
            self._tally.trend.load_state_dict(saved["trend"])
        self.probed_steps = saved["probed_steps"]
        self._stream = self._wait = None
        self._generator.set_state(saved["generator"].cpu())

    def _epoch(self, whole: Stream) -> Iterator[Window]:
        """Yield the windows of one epoch: Algorithm 1, lines 2 to 8.

        Before each window K is estimated if that is due. A window of K steps of context and K2
        losses starts where the last one's losses ended, less K. It runs when its user asks for its
        loss, and moves the cursor on by then: a checkpoint after that resumes after the window, and
        a window that failed is the next one again. The state at the window's start comes from
        `_carried`, which holds as much of the past as the largest K may need. `whole` has the rows
        of all processes.
        """
        same = self._stream is None or self._stream() is whole
        stream = self.ranks.deal(whole)
        if stream.cursor == stream.burn_in or self._carried.is_empty:
            self._carried.begin(stream.cursor, start_state(self.recurrent, stream))
        elif not same or self._carried.newest > stream.cursor:
            raise self._not_of(stream)
        self._stream, self._wait = weakref.ref(whole), None
        self._carried.open(self.recurrent, stream, self.ranks)
        request = self.request
        if request is not None:
            stream.reserve(max(self.burn_in, stream.burn_in) + request.steps)
        reach = self.controller.k_max if self.overlap else 0
        while True:
            # Before the estimate, not after the window, so that a resumed run holds the same steps.
            self._carried.forget(max(stream.cursor - reach, 0))
            stream.forget(self._carried.oldest)
            if stream.available(stream.cursor + 1) == stream.cursor:
                break
            if self._stream is None or self._stream() is not whole:
                raise self._not_of(stream)
            if request is not None and self._estimate_is_due(stream):
                self.estimate(stream)
            span = self._next_span(stream)
            shared = self._carried, self._tally, self.ranks, self.recompute
            window = Window(span, self.objective, stream, *shared)
            yield window
            window.pass_on()
        stream.next_epoch()

    def _next_span(self, stream: Stream) -> Span:
        """Return the span of the window at the stream's cursor."""
        first, usual = stream.cursor, self.losses_per_window(self.truncation.known_k)
        k, factors = self.controller.context(self.truncation, usual, self.trained_steps)
        planned = self._tally.long.next_losses(usual)
        start = max(first - k, self._carried.oldest) if self.overlap else first
        at = {first - back: factor for back, factor in factors if first - back > start}
        stop = stream.available(first + planned)
        following = stop - (self.truncation.known_k if self.overlap else 0)
        return Span(k, start, first, stop, planned, following, usual, at)

    def _not_of(self, stream: Stream) -> ValueError:
        return ValueError(
            f"the stream is at step {stream.cursor}, but the carried state is of another stream, "
            "or of a later step: rewind() the stream, or use one AdaptiveTBPTT per stream"
        )

    def _estimate_is_due(self, stream: Stream) -> bool:
        if self.truncation.k is None:
            return True
        since = self._tally.since_estimate
        if self.estimate_every is not None:
            return since >= self.estimate_every
        if self._wait is None:  # most windows need not ask again
            length = None if stream.length is None else stream.length - stream.burn_in
            self._wait = self.steps_between_estimates(length)
        return since >= self._wait

    def steps_between_estimates(self, epoch: int | None) -> int:
        """Return the steps from one estimate to the next.

        Args:
            epoch: steps of an epoch; None if the stream's length is unknown.
        """
        then = self.trained_steps - self._tally.since_estimate  # a resumed run finds the same
        so_far = SoFar(len(self.history), then, count_confirmed(self.history))
        return steps_between(self.request, self.estimates_per_epoch, epoch, self.burn_in, so_far)
