"""Measure phi_k = ||dL_s / dh_{s-k}|| for every row of a batch: BPTT(R, 1), Algorithm 1, line 4."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .backprop import Weigh, advance
from .decay import floor_of
from .denormals import flushed_denormals
from .fused import layer_pass
from .model import (
    LossFn,
    Nest,
    Recurrent,
    as_recurrent,
    check_finite,
    rows_of,
    slice_steps,
    steps_of,
)
from .profile import Array, LagProfile
from .state import State, leaves, map_leaves
from .stream import Segment, Stream, time_first
from .undisturbed import undisturbed
from .unroll import unroll

_NOT_REACHED = (
    "no gradient reaches the state: the loss does not depend on the state that entered its step"
)


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
    fused: bool = True,
) -> LagProfile:
    """Measure the gradient norms of the last step's loss at every lag, for every row.

    One forward and one backward pass. The parameters' `.grad`, the model's mode, its buffers and
    the caller's random state are left as they were.

    Args:
        model: any recurrent module; see `adaptive_tbptt.model`.
        loss_fn: `loss_fn(outputs, targets)`, a mean over time and batch. It is called on the last
            step alone. Targets that the loss ignores give columns of zeros.
        inputs: `(burn_in + window, rows, ...)`, or batch first where the model is.
        targets: of the same layout; only the last step is read.
        state: state entering the first step; None is the model's initial state.
        burn_in: leading steps that only warm the state up; no gradient flows into them.
        resets: `(burn_in + window, rows)` boolean, true where a row starts a new sequence.
        train: True or False measures in that mode. None keeps the mode the model is in: while
            training, dropout is part of the gradient that truncation would bias.
        batch_first: layout of model and data; None asks the model.
        state_batch_dim: overrides the search for the state's batch dimension.
        fused: False never takes the fast path for `nn.LSTM`, `nn.GRU` and `nn.RNN`, which is
            otherwise taken where it was found to give the same numbers.

    Returns:
        A profile of `burn_in + window` steps: lags 0..window, one column per row.

    Choosing the window: it should be well above the lag from which the decay is geometric, and
    above the largest k in reach. The cost is that of one long backward pass.

    >>> _ = torch.manual_seed(0)
    >>> lstm = nn.LSTM(3, 8)
    >>> x = torch.randn(30, 4, 3)
    >>> profile = probe(lstm, nn.functional.mse_loss, x, torch.zeros(30, 4, 8), burn_in=10)
    >>> profile.window, profile.samples, list(profile.component_norms)
    (20, 4, ['h[0]', 'c[0]'])
    """
    recurrent = as_recurrent(model, batch_first=batch_first, state_batch_dim=state_batch_dim)
    segment = time_first(inputs, targets, resets, batch_first=recurrent.batch_first)
    profile = probe_segment(recurrent, loss_fn, segment, state, burn_in, train=train, fused=fused)
    check_reached(profile, segment.resets)
    return profile


def probe_segment(
    recurrent: Recurrent,
    loss_fn: LossFn,
    segment: Segment,
    state: State = None,
    burn_in: int = 0,
    *,
    train: bool | None = None,
    fused: bool = True,
) -> LagProfile:
    """Probe a time-first segment; see `probe`. The caller is to `check_reached`."""
    inputs, targets, resets = segment
    if torch.is_inference_mode_enabled():
        raise RuntimeError("inference mode makes no gradients: probe outside of it")
    window = steps_of(inputs) - burn_in
    check_finite(inputs)
    if burn_in < 0 or window < 1:
        raise ValueError(
            f"burn_in must be in [0, {steps_of(inputs) - 1}] to leave a window in "
            f"{steps_of(inputs)} steps, got {burn_in}"
        )
    inputs, targets, state = recurrent.place((inputs, targets, state))
    with (
        undisturbed(recurrent.module, train, backward=True),
        torch.enable_grad(),
        flushed_denormals(),
    ):
        mode = recurrent.module.training
        _refuse_batch_norm(recurrent.module)
        state = _warm_up(recurrent, Segment(inputs, targets, resets), state, burn_in)
        observed = slice_steps((inputs, resets), burn_in, None)
        earlier = None
        if fused and window > 1 and (resets is None or not resets[burn_in:].any()):
            earlier = layer_pass(recurrent, slice_steps(observed[0], 0, window - 1), state)
        if earlier is not None:
            observed = slice_steps(observed, window - 1, None)
            reached = iter(earlier.final)
            state = map_leaves(lambda _: _as_variable(next(reached)), state)
        entering, final, features = _record(recurrent, observed[0], observed[1], state)
        loss = recurrent.loss(loss_fn, features, slice_steps(targets, -1, None))
        if not torch.isfinite(loss):
            raise ValueError(f"the loss is {loss.item()}: nothing can be measured there")
        if recurrent.has_features and not isinstance(features, Tensor):
            raise TypeError(
                f"core must return its features as one tensor, got {type(features).__name__}"
            )
        if not loss.requires_grad:
            raise ValueError(f"{_NOT_REACHED}. It depends on nothing that has a gradient")
        readout, by_lag = _differentiate(
            loss * rows_of(inputs), features if recurrent.has_features else None, entering
        )
        gradients = _stack(recurrent, by_lag)
        if earlier is not None:
            # Lag 1 came from autograd; the state it belongs to takes the others from here.
            further = earlier.backward(leaves(by_lag[0]))
            layers = [leaf[:, i].flip(0) for leaf in further for i in range(leaf.shape[1])]
            gradients = {
                name: torch.cat([g, more])
                for (name, g), more in zip(gradients.items(), layers, strict=True)
            }
    _check_finite_gradient(readout, gradients)
    seen = None if readout is None else _seen_by_readout(features, recurrent.components(final))
    return _reduce(readout, gradients, seen, train=mode, burn_in=burn_in)


def _warm_up(recurrent: Recurrent, segment: Segment, state: State, burn_in: int) -> State:
    """Return the detached state after the burn-in, as a variable to differentiate for."""
    recurrent.dims(segment.inputs)
    if state is not None:
        recurrent.check_rows(state, segment.inputs)
    if burn_in:
        state = advance(recurrent, segment.between(0, burn_in), state)
    elif state is None:
        state = recurrent.initial_state(segment.inputs)
    return map_leaves(_as_variable, state)


def _as_variable(leaf: Tensor) -> Tensor:
    return leaf.detach().clone().requires_grad_(leaf.is_floating_point())


def _record(
    recurrent: Recurrent, inputs: Nest, resets: Tensor | None, state: State
) -> tuple[list[State], State, Any]:
    """Run the window; return the state that enters each step, the last state and features."""

    def prepare(state: State) -> State:
        # A fresh alias: what the step before made of its own new state (a higher layer, say)
        # hangs on the original, so only the paths from this step on reach the alias.
        state = map_leaves(lambda x: x.view_as(x), state)
        if not any(x.requires_grad for x in leaves(state)):
            raise ValueError(
                f"the state of {type(recurrent.module).__name__} carries no gradient: it is "
                "detached inside, made under no_grad, or not of floating point"
            )
        return state

    entering = []
    for step in unroll(recurrent, inputs, state, resets, prepare):
        entering.append(step.entering)
    return entering, step.leaving, step.features


def _differentiate(
    loss: Tensor, features: Tensor | None, entering: list[State]
) -> tuple[Tensor | None, list[State]]:
    """One backward pass: the gradient at the readout, and at every entering state, lag 1 first."""
    wanted = [x for state in reversed(entering) for x in leaves(state) if x.requires_grad]
    if features is not None:
        wanted.append(features)
    found = list(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))
    readout = found.pop() if features is not None else None
    remaining = iter(found)
    return readout, [
        map_leaves(lambda x: next(remaining) if x.requires_grad else x, state)
        for state in reversed(entering)
    ]


def _stack(recurrent: Recurrent, by_lag: list[State]) -> dict[str, Tensor]:
    """Return `(lags, rows, dims)` for every component of the state."""
    parts = [recurrent.components(gradient) for gradient in by_lag]
    return {name: torch.stack([p[name] for p in parts]) for name in parts[0]}


def _seen_by_readout(features: Any, components: dict[str, Tensor]) -> str | None:
    """Name the part of the state that the readout sees, such as the top layer's h, if any."""
    for name, part in reversed(components.items()):
        if features.numel() == part.numel() and torch.equal(features.reshape(part.shape), part):
            return name
    return None


def _reduce(
    readout: Tensor | None,
    gradients: dict[str, Tensor],
    seen: str | None,
    *,
    train: bool,
    burn_in: int,
) -> LagProfile:
    """Gradients to norms, in float64. Lag 0 comes first, then the lags of the state."""
    stacks = {name: g.detach().cpu().double().numpy() for name, g in gradients.items()}
    _, rows, _ = next(iter(stacks.values())).shape
    lag0 = np.full(rows, np.nan)
    extra = np.zeros((1, 0))
    first = {name: np.zeros((1, g.shape[2])) for name, g in stacks.items()}
    if readout is not None:
        at_readout = readout.detach().cpu().double().numpy().reshape(1, rows, -1)
        lag0 = _norms(at_readout)[0]
        if seen is None:
            extra = at_readout.mean(axis=1)
        else:
            first[seen] = at_readout.mean(axis=1)
    components = {
        name: np.vstack([lag0 if name == seen else 0.0 * lag0, _norms(g)])
        for name, g in stacks.items()
    }
    # The sum over lags lives in the space of the state; a readout of its own is kept beside it.
    means = [np.vstack([first[name], g.mean(axis=1)]) for name, g in stacks.items()]
    lags = means[0].shape[0]
    means.append(np.vstack([extra, np.zeros((lags - 1, extra.shape[1]))]))
    norms = np.vstack([lag0, np.hypot.reduce([c[1:] for c in components.values()])])
    return LagProfile(
        state_norms=norms,
        component_norms=components,
        cumulative_gradient=np.cumsum(np.hstack(means), axis=0),
        floor=max(floor_of(torch.finfo(g.dtype)) for g in gradients.values()),
        train=train,
        burn_in=burn_in,
    )


def _norms(gradients: Array) -> Array:
    """Euclidean norm over the last axis, scaled so that squares neither under- nor overflow."""
    scale = np.abs(gradients).max(axis=-1, keepdims=True)
    scale = np.where(scale == 0.0, 1.0, scale)
    return np.asarray(np.linalg.norm(gradients / scale, axis=-1) * scale[..., 0])


def _refuse_batch_norm(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training:
            raise ValueError(
                f"'{name}' is batch normalisation in training mode: it makes the rows depend on "
                "each other. Probe with train=False, or normalise otherwise (LayerNorm)"
            )


def _check_finite_gradient(readout: Tensor | None, gradients: dict[str, Tensor]) -> None:
    if readout is not None and not torch.isfinite(readout).all():
        raise ValueError("the gradient is NaN or infinite at lag 0, where the loss meets the model")
    lags = next(iter(gradients.values())).shape[0]
    for lag in range(lags):
        if not all(torch.isfinite(g[lag]).all() for g in gradients.values()):
            raise ValueError(
                f"the gradient is NaN or infinite at lag {lag + 1}: the recurrence explodes; "
                "measure a shorter window, or smaller weights"
            )


def check_reached(profile: LagProfile, resets: Tensor | None = None) -> None:
    """Refuse a profile in which no gradient reaches the state that entered the loss's step."""
    alive = np.ones(profile.samples, dtype=bool)
    if resets is not None:
        alive = ~resets[-1].cpu().numpy()
    if alive.any() and not profile.state_norms[1, alive].any():
        raise ValueError(
            f"{_NOT_REACHED}. A kernel that drops the gradient of the state it is handed looks "
            "like this, and would make every truncation length look safe"
        )


def draw_segment(
    stream: Stream, steps: int, weigh: Weigh, generator: torch.Generator | None = None
) -> Segment:
    """Draw a random segment whose last step carries at least one loss that is not masked."""
    for _ in range(100):  # arbitrary: a stream with one loss in twenty fails once in 10^2 runs
        segment = stream.random_segment(steps, generator)
        if weigh(slice_steps(segment.targets, -1, None)) > 0:
            return segment
    raise ValueError("a hundred random segments held no loss: nearly every target is masked")
