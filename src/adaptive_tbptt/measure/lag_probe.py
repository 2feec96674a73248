"""Measure phi_k = ||dL_s / dh_{s-k}|| for every row of a batch: BPTT(R, 1), Algorithm 1, line 4."""

from __future__ import annotations

from torch import Tensor, nn

from .._torch.preserve_model import measuring
from ..data.nest import Nest, State, as_real
from ..data.stream import Segment, check_finite, time_first
from ..estimate.lag_profile import LagProfile
from ..model.objective import CountLosses, Objective
from ..model.recurrent import LossFn, Recurrent
from ..model.running import warm_up
from .checks import alive_rows, check_reached, refuse_batch_norm, warn_of_dropped_gradients
from .lag_norms import LagNorms
from .loss_step import LossStep
from .plan import ProbePlan, ProbeSettings, plan_probe
from .recompute import Segments


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

    One forward and one backward pass. The parameters' `.grad`, the model's mode, its buffers and
    the caller's random state are left as they were.

    Args:
        model: any recurrent module; see `adaptive_tbptt.model`.
        loss_fn: `loss_fn(outputs, targets)`, a mean over time and batch. The probe calls it on the
            last step alone. Targets that the loss ignores give columns of zeros.
        inputs: `(burn_in + lags, rows, ...)`, or batch first where the model is.
        targets: of the same layout; only the last step is read.
        state: state entering the first step; None is the model's initial state.
        burn_in: leading steps that only warm the state up; no gradient flows into them.
        resets: `(burn_in + lags, rows)` boolean, true where a row starts a new sequence.
        train: True or False measures in that mode. None keeps the mode the model is in: while
            training, dropout is part of the gradient that truncation would bias.
        count_losses: as in `AdaptiveTBPTT`, where targets are masked.
        batch_first: layout of model and data; None asks the model.
        state_batch_dim: overrides the search for the state's batch dimension.
        settings: what the probe may do to be fast and small.

    Returns:
        A profile of lags 0..lags, one column per row.

    Choosing the number of lags: take it well above the lag from which the decay is geometric, and
    above the largest k in reach. The cost is that of one long backward pass.

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
    settings = settings or ProbeSettings()
    profile, _ = probe_segment(objective, segment, state, burn_in, train=train, settings=settings)
    check_reached(profile, alive_rows(segment, objective.count_losses, profile))
    return profile


def probe_segment(
    objective: Objective,
    segment: Segment,
    state: State = None,
    burn_in: int = 0,
    *,
    train: bool | None = None,
    settings: ProbeSettings,
    plan: ProbePlan | None = None,
) -> tuple[LagProfile, ProbePlan]:
    """Probe a time-first segment; return the profile, and the plan for the next one.

    The caller is to `check_reached`: a segment whose rows all reset at its last step has no
    gradient to reach the state.
    """
    recurrent = objective.recurrent
    check_finite(segment.inputs)
    if not 0 <= burn_in < segment.steps:
        raise ValueError(
            f"burn_in must be in [0, {segment.steps - 1}] to leave a lag in {segment.steps} "
            f"steps, got {burn_in}"
        )
    lags = segment.steps - burn_in
    segment, state = recurrent.place((segment, state))
    with measuring(objective.modules, train):
        mode = recurrent.module.training
        refuse_batch_norm(recurrent.module)
        recurrent.dims(segment.inputs)
        if state is not None:
            state = as_real(state)
            recurrent.check_rows(state, segment.inputs)
        state = warm_up(recurrent, segment, burn_in, state)
        before = segment.between(burn_in, segment.steps - 1)
        step = segment.between(segment.steps - 1, segment.steps)
        if before.steps:
            plan = plan_probe(recurrent, before.inputs, state, settings, plan)
        plan = plan or ProbePlan(None)
        earlier = Segments(recurrent, before, state, plan, settings.held_steps)
        last = LossStep(objective, step, earlier.final)
        readout, lag1 = last.backward()
        norms = LagNorms(recurrent, readout, last.step, lags, last.scale)
        norms.add([g[None] for g in lag1])
        for gradients in earlier.backward(lag1):
            norms.add([g.flip(0) for g in gradients])
        profile = norms.profile(train=mode, burn_in=burn_in)
        warn_of_dropped_gradients(recurrent, profile, step, earlier.final)
    return profile, plan
