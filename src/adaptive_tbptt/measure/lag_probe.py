"""Measure phi_k = ||dL_s / dh_{s-k}|| for every row of a batch: BPTT(R, 1), Algorithm 1, line 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .._torch.compiling import eager
from .._torch.denormals import flushed_denormals
from .._torch.preserve_model import preserve
from ..data.nest import Nest, State, as_real, detach, map_leaves
from ..data.rows import select_rows
from ..data.segment import Segment, check_finite, time_first
from ..estimate.lag_profile import LagProfile
from ..model.losses import CountLosses, default_count, refuse_sums
from ..model.pieces import advance
from ..model.recurrent import LossFn, Recurrent, as_recurrent
from .affine_uses import NotAffine, trained
from .dropped_gradients import warn_of_unreached_parts
from .lag_norms import LagNorms
from .loss_step import LastStep
from .parameter_lags import ParameterLags
from .recompute import Segments
from .sampling import alive_rows, check_reached, rows_with_loss

HELD_STEPS = 400  # the paper's longest window; about 300 MiB for an LSTM of 128 units, 64 rows


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
    batch_first: bool | None = None,
    state_batch_dim: int | None = None,
    parameters: bool = False,
    sketch: int = 0,
    fused: bool = True,
    held_steps: int = HELD_STEPS,
    count_losses: CountLosses | None = None,
) -> LagProfile:
    """Measure the gradient norms of the last step's loss at every lag, for every row.

    One forward and one backward pass. The parameters' `.grad`, the model's mode, its buffers and
    the caller's random state are left as they were.

    Args:
        model: any recurrent module; see `adaptive_tbptt.model`.
        loss_fn: `loss_fn(outputs, targets)`, a mean over time and batch. It is called on the last
            step alone. Targets that the loss ignores give columns of zeros.
        inputs: `(burn_in + lags, rows, ...)`, or batch first where the model is.
        targets: of the same layout; only the last step is read.
        state: state entering the first step; None is the model's initial state.
        burn_in: leading steps that only warm the state up; no gradient flows into them.
        resets: `(burn_in + lags, rows)` boolean, true where a row starts a new sequence.
        train: True or False measures in that mode. None keeps the mode the model is in: while
            training, dropout is part of the gradient that truncation would bias.
        batch_first: layout of model and data; None asks the model.
        state_batch_dim: overrides the search for the state's batch dimension.
        parameters: also measure the contribution c_k of every lag to the gradient of the
            parameters: `profile.contributions`.
        sketch: size of the sketches of c_k, from which the bias itself is measured; 0 makes none.
        fused: False never takes the fast path for `nn.LSTM`, `nn.GRU` and `nn.RNN`, which is
            otherwise taken where it was found to give the same numbers.
        held_steps: steps of the window that are held in memory at once. A longer window is run
            forward twice, so memory does not grow with it beyond the norms themselves.
        count_losses: as in `AdaptiveTBPTT`, where targets are masked.

    Returns:
        A profile of `burn_in + window` steps: lags 0..window, one column per row.

    Choosing the window: it should be well above the lag from which the decay is geometric, and
    above the largest k in reach. The cost is that of one long backward pass.

    >>> _ = torch.manual_seed(0)
    >>> lstm = nn.LSTM(3, 8)
    >>> x = torch.randn(30, 4, 3)
    >>> profile = probe(lstm, nn.functional.mse_loss, x, torch.zeros(30, 4, 8), burn_in=10)
    >>> profile.lags, profile.samples, list(profile.component_norms)
    (20, 4, ['h[0]', 'c[0]'])
    """
    recurrent = as_recurrent(model, batch_first=batch_first, state_batch_dim=state_batch_dim)
    segment = time_first(inputs, targets, resets, batch_first=recurrent.batch_first)
    profile = probe_segment(
        recurrent,
        loss_fn,
        segment,
        state,
        burn_in,
        train=train,
        parameters=parameters,
        sketch=sketch,
        fused=fused,
        held_steps=held_steps,
        count_losses=count_losses,
    )
    count_losses = default_count(loss_fn) if count_losses is None else count_losses
    check_reached(profile, alive_rows(segment, count_losses, profile))
    return profile


def probe_segment(
    recurrent: Recurrent,
    loss_fn: LossFn,
    segment: Segment,
    state: State = None,
    burn_in: int = 0,
    *,
    train: bool | None = None,
    parameters: bool = False,
    sketch: int = 0,
    fused: bool = True,
    held_steps: int = HELD_STEPS,
    count_losses: CountLosses | None = None,
) -> LagProfile:
    """Probe a time-first segment; see `probe`. The caller is to `check_reached`."""
    refuse_sums(loss_fn)
    count_losses = default_count(loss_fn) if count_losses is None else count_losses
    if torch.is_inference_mode_enabled():
        raise RuntimeError("inference mode makes no gradients: probe outside of it")
    check_finite(segment.inputs)
    if held_steps < 1:
        raise ValueError(f"held_steps must be at least 1, got {held_steps}")
    if not 0 <= burn_in < segment.steps:
        raise ValueError(
            f"burn_in must be in [0, {segment.steps - 1}] to leave a window in "
            f"{segment.steps} steps, got {burn_in}"
        )
    window = segment.steps - burn_in
    segment, state = recurrent.place((segment, state))
    with (
        preserve(recurrent.module, train, backward=True),
        torch.enable_grad(),
        flushed_denormals(),
        eager(),
    ):
        mode = recurrent.module.training
        refuse_batch_norm(recurrent.module)
        state = _warm_up(recurrent, segment, state, burn_in)
        before = segment.between(burn_in, segment.steps - 1)
        step = segment.between(segment.steps - 1, segment.steps)

        def measure(affine: bool) -> LagProfile:
            lags = None
            if parameters or sketch > 0:
                lags = ParameterLags(recurrent, window, segment.rows, sketch, affine=affine)
            earlier = Segments(recurrent, before, state, length=held_steps, fused=fused, lags=lags)
            last = LastStep(recurrent, loss_fn, step, earlier.final, lags, count_losses)
            readout, lag1 = last.backward()
            norms = LagNorms(recurrent, readout, last.step, window, last.scale)
            norms.add([g[None] for g in lag1])
            for gradients in earlier.backward(lag1):
                norms.add([g.flip(0) for g in gradients])
            profile = norms.profile(train=mode, burn_in=burn_in)
            if lags is not None:
                profile = replace(profile, contributions=lags.result())
            warn_of_unreached_parts(recurrent, profile, step, earlier.final)
            return profile

        try:
            recorded = (parameters or sketch > 0) and fused
            return measure(recorded and is_affine(recurrent, loss_fn, segment, state, count_losses))
        except NotAffine:  # seen only now: at a reset, or in a part that was frozen before
            recurrent.affine = False
            return measure(False)


def _warm_up(recurrent: Recurrent, segment: Segment, state: State, burn_in: int) -> State:
    """Return the detached state after the burn-in."""
    recurrent.dims(segment.inputs)
    if state is not None:
        state = as_real(state)
        recurrent.check_rows(state, segment.inputs)
    if burn_in:
        return advance(recurrent, segment.between(0, burn_in), state)
    return detach(recurrent.initial_state(segment.inputs) if state is None else state)


def is_affine(
    recurrent: Recurrent, loss_fn: LossFn, segment: Segment, state: State, count_losses: CountLosses
) -> bool:
    """Tell whether recording how parameters are used gives what one pass per row gives.

    Found out once per set of trained parameters, on a few steps of up to two rows.
    """
    # Two steps do not tell whether the layer can be fused.
    if torch.is_autocast_enabled(recurrent.device.type) or segment.steps < 3:
        return False
    names = tuple(trained(recurrent.module))
    if recurrent.recorded not in (None, names):
        recurrent.affine = None
    recurrent.recorded = names
    if recurrent.affine is None:
        rows = torch.from_numpy(np.flatnonzero(rows_with_loss(segment, count_losses))[:2])
        if len(rows) < 2:  # a single row does not tell steps from rows
            return False
        parts = (segment.inputs, segment.targets)
        few = Segment(*(map_leaves(lambda x: x[-4:, rows.to(x.device)], part) for part in parts))
        start = select_rows(detach(state), rows, recurrent.dims(segment.inputs))
        recurrent.affine = True  # for now; a probe that finds otherwise says so
        options: dict[str, Any] = {"train": False, "parameters": True, "count_losses": count_losses}
        try:
            ours, theirs = (
                probe_segment(recurrent, loss_fn, few, start, fused=fused, **options).contributions
                for fused in (True, False)
            )
        except Exception:
            recurrent.affine = None  # nothing was found out
            raise
        assert ours is not None
        assert theirs is not None
        least = 1e-6 * theirs.norms.max()  # of a gradient that is mostly cancelled
        same = np.allclose(ours.norms, theirs.norms, rtol=1e-3, atol=least)
        recurrent.affine = recurrent.affine and same
    return recurrent.affine


def refuse_batch_norm(module: nn.Module) -> None:
    """Refuse batch normalisation that would use the rows of a measurement for its statistics."""
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training:
            raise ValueError(
                f"'{name}' is batch normalisation in training mode: it makes the rows depend on "
                "each other. Measure in eval mode, or normalise otherwise (LayerNorm)"
            )
