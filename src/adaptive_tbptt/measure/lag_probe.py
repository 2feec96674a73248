"""Measure phi_k = ||dL_s / dh_{s-k}|| for every row of a batch: BPTT(R, 1), Algorithm 1, line 4."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from .._torch.number_formats import autocast_format, no_autocast
from .._torch.preserve_model import measuring
from ..data.nest import Nest, State, as_real, leaves, map_leaves, rows_of, with_gradients
from ..data.segment import Segment, check_finite, time_first
from ..estimate.lag_profile import LagProfile
from ..model.objective import CountLosses, Objective
from ..model.recurrent import LossFn, Recurrent
from ..model.running import unroll, warm_up
from .checks import (
    NOT_REACHED,
    alive_rows,
    check_reached,
    refuse_batch_norm,
    warn_of_dropped_gradients,
)
from .fused_layer import ProbePlan, fused_pass
from .lag_norms import LagNorms
from .passes import HELD_STEPS, Pass, Replay, StepPass, as_variable


@dataclass(frozen=True)
class ProbeSettings:
    """Speed and memory of a probe.

    Attributes:
        fused: True takes the fast path for `nn.LSTM`, `nn.GRU` and `nn.RNN` if it gives the same
            numbers as the general one; False never takes it.
        held_steps: steps held in memory at once. A probe of more lags runs forward twice; only the
            norms then grow with the lags.
    """

    fused: bool = True
    held_steps: int = HELD_STEPS

    def __post_init__(self) -> None:
        if self.held_steps < 1:
            raise ValueError(f"held_steps must be at least 1, got {self.held_steps}")


def probe(
    model: nn.Module | Recurrent,
    loss_fn: LossFn,
    inputs: Nest,
    targets: Nest,
    state: State = None,
    burn_in: int = 0,
    *,
    resets: Tensor | None = None,
    train: bool | None = None,
    count_losses: CountLosses | None = None,
    batch_first: bool | None = None,
    state_batch_dim: int | None = None,
    settings: ProbeSettings | None = None,
) -> LagProfile:
    """Measure the gradient norms of the last step's loss at every lag, for every row.

    One forward and one backward pass. The probe leaves the parameters' `.grad`, the model's mode
    and buffers, and the random state as they were.

    Args:
        model: any recurrent module; see `adaptive_tbptt.model`.
        loss_fn: `loss_fn(outputs, targets)`, a mean over time and batch. The probe calls it on the
            last step alone. Targets that the loss ignores give columns of zeros.
        inputs: `(burn_in + lags, rows, ...)`, or batch first if the model is.
        targets: of the same layout; only the last step is read.
        state: state entering the first step; None is the model's initial state.
        burn_in: leading steps that only warm the state up; no gradient flows into them.
        resets: `(burn_in + lags, rows)` boolean, true where a row starts a new sequence.
        train: True or False measures in that mode. None keeps the model's mode: while training,
            dropout is part of the gradient that truncation biases.
        count_losses: as in `AdaptiveTBPTT`, for masked targets.
        batch_first: layout of model and data; None reads the model's attribute.
        state_batch_dim: overrides the search for the state's batch dimension.
        settings: speed and memory.

    Returns:
        A profile of lags 0..lags, one column per row.

    Choosing the number of lags: take it well above the lag from which the decay is geometric, and
    above the largest k you would use. The cost is that of one long backward pass.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> lstm = nn.LSTM(3, 8)
    >>> x = torch.randn(30, 4, 3)
    >>> profile = probe(lstm, nn.functional.mse_loss, x, torch.zeros(30, 4, 8), burn_in=10)
    >>> profile.lags, profile.samples, list(profile.component_norms)
    (20, 4, ['h[0]', 'c[0]'])
    """
    objective = Objective.of(
        model, loss_fn, count_losses, batch_first=batch_first, state_batch_dim=state_batch_dim
    )
    segment = time_first(inputs, targets, resets, batch_first=objective.recurrent.batch_first)
    profile = probe_segment(objective, segment, state, burn_in, train=train, settings=settings)
    check_reached(profile, alive_rows(segment, objective.count_losses, profile))
    warn_of_dropped_gradients(objective, segment)
    return profile


def probe_segment(
    objective: Objective,
    segment: Segment,
    state: State = None,
    burn_in: int = 0,
    *,
    train: bool | None = None,
    settings: ProbeSettings | None = None,
    plan: ProbePlan | None = None,
) -> LagProfile:
    """Probe a time-first segment; `plan` comes from earlier probes of this model, if any.

    Call `check_reached` on the joined profiles, not here: in a single segment all rows may reset
    at the last step, and then no gradient reaches the state.
    """
    recurrent, settings = objective.recurrent, settings or ProbeSettings()
    check_finite(segment.inputs)
    steps, held = segment.steps, settings.held_steps
    if not 0 <= burn_in < steps:
        raise ValueError(
            f"burn_in must be in [0, {steps - 1}] to leave a lag in {steps} steps, got {burn_in}"
        )
    segment, state = recurrent.place((segment, state))
    with measuring(objective.modules, train):
        mode = recurrent.module.training
        refuse_batch_norm(recurrent.module)
        recurrent.dims(segment.inputs)
        if state is not None:
            state = as_real(state)
            recurrent.check_rows(state, segment.inputs)
        state = warm_up(recurrent, segment, burn_in, state)
        before, step = segment.between(burn_in, steps - 1), segment.between(steps - 1, steps)
        cuts = [*range(0, before.steps, held), before.steps]
        parts = [before.between(start, stop) for start, stop in pairwise(cuts)]
        layer = None
        if parts and settings.fused:
            layer = (plan or ProbePlan()).layer(recurrent, before.inputs, state)

        def run(part: Segment, state: State) -> Pass:
            if layer is None:
                return StepPass(recurrent, part, state)
            return fused_pass(recurrent, layer, part, state)

        earlier = Replay(recurrent, parts, state, run)
        last = LossStep(objective, step, earlier.final)
        norms = LagNorms(recurrent, last.readout, last.step, steps - burn_in, last.scale)
        norms.add([g[None] for g in last.lag1])
        gradients = last.lag1
        for _ in parts:
            found = earlier.pop().backward(gradients)
            norms.add([g.flip(0) for g in found])
            gradients = [g[0] for g in found]
        return norms.profile(train=mode, burn_in=burn_in)


class LossStep:
    """The step that carries the loss, backpropagated to the state that entered it.

    The loss is summed over the rows, so that each row has the gradient of its own loss.

    Args:
        objective: model and loss.
        segment: that one step.
        state: state entering it.

    Attributes:
        step: the step as it ran.
        scale: the factor on the loss, so that float16 holds the gradients of the lags.
        readout: gradient with respect to what the readout sees; None if that is not exposed.
        lag1: gradients of the leaves of the state that entered.
    """

    def __init__(self, objective: Objective, segment: Segment, state: State) -> None:
        recurrent = self._recurrent = objective.recurrent
        (self.step,) = unroll(
            recurrent, segment.inputs, map_leaves(as_variable, state), segment.resets
        )
        if recurrent.has_features and not isinstance(self.step.features, Tensor):
            raise TypeError(
                "core must return its features as one tensor, got "
                f"{type(self.step.features).__name__}"
            )
        loss = objective.loss(self.step.features, segment.targets)
        if not torch.isfinite(loss):
            raise ValueError(f"the loss is {loss.item()}: it has no gradient to measure")
        rows = rows_of(segment.inputs)
        total = loss * rows
        self.scale = self._find_scale(total, rows)
        self.readout, self.lag1 = self._differentiate(total * self.scale)

    def _differentiate(
        self, loss: Tensor, again: bool = False
    ) -> tuple[Tensor | None, list[Tensor]]:
        if not loss.requires_grad:
            raise ValueError(f"{NOT_REACHED}. It depends on nothing that requires a gradient")
        entering = leaves(self.step.entering)
        wanted = [x for x in entering if x.requires_grad]
        if self._recurrent.has_features:
            wanted.append(self.step.features)
        with no_autocast(loss.device):
            found = iter(
                torch.autograd.grad(
                    loss, wanted, retain_graph=again, allow_unused=True, materialize_grads=True
                )
            )
        lag1: list[Tensor] = with_gradients(entering, found)
        return next(found) if self._recurrent.has_features else None, lag1

    def _find_scale(self, loss: Tensor, rows: int) -> float:
        """Return a power of two that keeps the gradients of the lags in the range of float16.

        Without it, gradients below 6e-5 would lose precision. The largest entry at lag 1 becomes
        about 2^8 (arbitrary: it leaves as much room upwards). 2^15 is the largest power of two in
        float16; a float16 loss is a mean over rows, so its gradient is `rows` times the scale.
        Other formats need no scale.
        """
        formats = {x.dtype for x in leaves(self.step.entering)}
        if torch.float16 not in formats | {autocast_format(loss.device)}:
            return 1.0
        _, lag1 = self._differentiate(loss, again=True)
        largest = max(float(g.abs().max()) for g in lag1)
        most = 15 - math.ceil(math.log2(rows if loss.dtype is torch.float16 else 1))
        if largest == 0.0:
            return 2.0**most
        if not math.isfinite(largest):
            return 1.0
        return 2.0 ** min(math.floor(8 - math.log2(largest)), most)
