"""Is the model stable, data-dependent stable, or only decaying in expectation?

The paper's point ('Vanishing and exploding bounds') is that trained RNNs are usually the third
without being the first two: one step may stretch the state, yet the gradient decays on average.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .backprop import advance
from .compiled import eager
from .decay import DecayFit
from .model import Nest, Recurrent, as_recurrent, slice_steps
from .precision import wide
from .state import State, join_rows, leaves, map_leaves, per_row, select_rows, with_gradients
from .stream import Segment, time_first
from .undisturbed import undisturbed
from .unroll import unroll


@dataclass(frozen=True)
class Stability:
    """Which of the paper's three notions of decay the model satisfies.

    Attributes:
        stable: whether a sufficient condition for a contraction holds (Miller and Hardt, 2019);
            None where no condition is known for the module.
        condition: the numbers behind `stable`, as a sentence.
        jacobian_norm: largest ||dh_t/dh_{t-1}|| over the observed states and inputs.
        fit: the decay in expectation.
    """

    stable: bool | None
    condition: str
    jacobian_norm: float
    fit: DecayFit

    @property
    def data_dependent_stable(self) -> bool:
        """Whether no observed step stretches the state (Eq. lipschitz_restrict on the data)."""
        return self.jacobian_norm < 1.0

    @property
    def decays(self) -> bool:
        """Whether the gradient decays in expectation (A-1)."""
        return self.fit.decays

    @property
    def verdict(self) -> str:
        """One sentence that says which of the three it is."""
        stretch = f"one step changes the state by a factor of up to {self.jacobian_norm:.3g}"
        decay = f"beta={self.fit.rate} from lag {self.fit.tau} on"
        if self.stable and self.data_dependent_stable:
            return f"stable: {self.condition}"
        if self.stable:
            return f"stable over several steps together ({self.condition}), though {stretch}"
        if self.data_dependent_stable:
            return f"stable on this data, not shown to be in general: {stretch}"
        if self.decays:
            return f"decaying in expectation though unstable: {decay}, yet {stretch}"
        return f"not decaying: {decay}, and {stretch}"


def stability(
    model: nn.Module | Recurrent,
    inputs: Nest,
    fit: DecayFit,
    *,
    resets: Tensor | None = None,
    burn_in: int = 0,
    samples: int = 256,
    seed: int = 0,
) -> Stability:
    """Classify the model at its present parameters.

    Args:
        model: any recurrent module.
        inputs: laid out as the model takes them: where to observe states and inputs.
        fit: the decay measured on such data.
        resets: as in `probe`.
        burn_in: leading steps whose states are not used.
        samples: number of observed (state, input) pairs, drawn at random, whose Jacobian is taken.
        seed: of that draw and of the power iteration.

    The model runs in eval mode: stability is a property of the recurrence, not of its dropout.
    """
    recurrent = as_recurrent(model)
    segment = time_first(inputs, inputs, resets, batch_first=recurrent.batch_first)
    return classify(recurrent, segment, fit, burn_in=burn_in, samples=samples, seed=seed)


def classify(
    recurrent: Recurrent,
    segment: Segment,
    fit: DecayFit,
    *,
    burn_in: int = 0,
    samples: int = 256,
    seed: int = 0,
) -> Stability:
    """Classify the model on a time-first segment; see `stability`."""
    if not 0 <= burn_in < segment.steps:
        raise ValueError(
            f"burn_in must leave some of the {segment.steps} steps to observe, got {burn_in}"
        )
    inputs = recurrent.place(segment.inputs)
    warm, observed = slice_steps(inputs, 0, burn_in), slice_steps(inputs, burn_in, None)
    resets = None if segment.resets is None else segment.resets[burn_in:]
    with undisturbed(recurrent.module, train=False, backward=True), eager():
        with torch.no_grad(), _largest_inputs(recurrent.module) as largest:
            state = None if burn_in else recurrent.initial_state(inputs)
            if burn_in:
                state = advance(recurrent, segment.between(0, burn_in)._replace(inputs=warm), state)
            states = [step.entering for step in unroll(recurrent, observed, state, resets)]
        dims = recurrent.dims(inputs)
        # A step that resets a row has no Jacobian to speak of.
        alive = (
            torch.ones(len(states), segment.rows, dtype=torch.bool) if resets is None else ~resets
        )
        pairs = torch.nonzero(alive.flatten()).flatten()
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))
        picks = pairs[order[:samples]]
        if len(picks) == 0:
            return Stability(None, "every observed step starts a sequence", 0.0, fit)
        chosen = select_rows(join_rows(states, dims), picks, dims)
        x = map_leaves(lambda leaf: leaf.flatten(0, 1)[picks.to(leaf.device)][None], observed)
        norms = jacobian_norms(recurrent, x, chosen, seed=seed)
    norm = float(norms.max())
    stable, condition = contraction(recurrent.module, largest)
    if stable and norm >= 1.0 and not _layers(recurrent.module):
        # The parts contract, but what the module makes of them may not.
        stable, condition = False, f"its parts contract ({condition}), the whole does not"
    return Stability(stable, condition, norm, fit)


def jacobian_norms(
    recurrent: Recurrent,
    inputs: Nest,
    state: State,
    *,
    iterations: int = 200,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> Tensor:
    """Return ||dh_t/dh_{t-1}|| for every row of one step, by power iteration on J^T J.

    J v comes from differentiating J^T u with respect to u; where a kernel can be differentiated
    only once, from central differences. Power iteration approaches the norm from below.

    Args:
        recurrent: the model.
        inputs: `(1, rows, ...)`.
        state: state entering that step.
        iterations: at most this many; arbitrary.
        tolerance: stop when no row's estimate grew by this fraction over the last ten iterations,
            and not before the thirtieth: a direction that stretches may take a while to emerge.
        seed: of the starting vectors.
    """
    with torch.enable_grad():
        rows = iter(recurrent.dims(inputs))  # a part without rows is no part of a row's state
        state = map_leaves(
            lambda x: x.detach().requires_grad_(next(rows) is not None and x.is_floating_point()),
            state,
        )
        _, after = recurrent.core(inputs, state)
        before = [x for x in leaves(state) if x.requires_grad]
        stepped = [x for x in leaves(after) if x.requires_grad]
        u = [torch.zeros_like(x, requires_grad=True) for x in stepped]
        pullback = torch.autograd.grad(
            stepped, before, u, create_graph=True, allow_unused=True, materialize_grads=True
        )
        generator = torch.Generator().manual_seed(seed)
        v: Any = map_leaves(
            lambda x: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x), state
        )
        history: list[Tensor] = []
        twice = True  # whether a second derivative is to be had, and right
        for _ in range(iterations):
            v = _normalise(recurrent, v)
            directions = [
                d for d, x in zip(leaves(v), leaves(state), strict=True) if x.requires_grad
            ]
            along = _pushed(pullback, u, directions) if twice else None
            if along is None:
                twice, along = False, _differences(recurrent, inputs, state, v, after)
            history.append(_row_norms(recurrent, with_gradients(after, along)).detach())
            if len(history) >= 30 and bool((history[-1] <= history[-11] * (1 + tolerance)).all()):
                break
            back = with_gradients(
                state,
                torch.autograd.grad(
                    stepped,
                    before,
                    along,
                    retain_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                ),
            )
            if twice and not _agree(_row_products(recurrent, v, back), history[-1] ** 2, stepped):
                twice, history = False, []
                continue
            v = back
    return history[-1]


def _pushed(
    pullback: tuple[Tensor, ...], u: list[Tensor], directions: list[Tensor]
) -> list[Tensor] | None:
    """Return J v, or None where J^T u cannot be differentiated with respect to u."""
    try:
        found = torch.autograd.grad(pullback, u, directions, retain_graph=True, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # marked as differentiable once, or nothing depends on the state
        return None
    return None if any(g is None for g in found) else list(found)


def _agree(ours: Tensor, theirs: Tensor, stepped: list[Tensor]) -> bool:
    """Whether <v, J^T J v> is |J v|^2: it is not where a kernel's second derivative is missing."""
    rtol = max(1e-2, 16 * _resolution(stepped))  # bfloat16 has but eight bits
    return torch.allclose(ours, theirs, rtol=rtol, atol=1e-6 * float(theirs.max()))


def _resolution(tensors: list[Tensor]) -> float:
    return max(torch.finfo(x.dtype).eps for x in tensors)


def _differences(
    recurrent: Recurrent, inputs: Nest, state: State, v: State, after: State
) -> list[Tensor]:
    """Return J v from two more steps, for the leaves of `after` that carry a gradient."""
    width = _resolution([x for x in leaves(after) if x.requires_grad]) ** (1 / 3)
    dims = sum(part.shape[1] for part in recurrent.components(state).values())
    size = (_row_norms(recurrent, state).detach() / math.sqrt(dims)).clamp_min(1.0)
    step = _times(recurrent, v, width * size)

    def moved(sign: float) -> State:
        shifted = map_leaves(lambda x, d: x + sign * d if x.is_floating_point() else x, state, step)
        with torch.no_grad():
            return recurrent.core(inputs, shifted)[1]

    slope = _times(recurrent, map_leaves(torch.sub, moved(1.0), moved(-1.0)), 0.5 / (width * size))
    carried = [x.requires_grad for x in leaves(after)]
    return [x for x, own in zip(leaves(slope), carried, strict=True) if own]


def contraction(module: nn.Module, largest: dict[nn.Module, float]) -> tuple[bool | None, str]:
    """Check the known sufficient conditions of Miller and Hardt, layer by layer.

    Simple RNN: ||W||_2 < 1, tanh and ReLU being 1-Lipschitz. LSTM, in the infinity norm:
    ||W_i||, ||W_o|| < 1 - f, ||W_z|| <= (1 - f) / 4 and ||W_f|| < (1 - f)^2, where f bounds the
    forget gate for inputs no larger than those observed; then a few steps together contract.

    Args:
        module: the user's module; every RNN and LSTM in it is looked at.
        largest: the largest |x| that each of them was given.
    """
    found: list[tuple[bool, str]] = []
    for name, part in module.named_modules():
        label = f"'{name}' " if name else ""
        for suffix in _layers(part):
            if isinstance(part, nn.RNN | nn.RNNCell):
                weight = getattr(part, f"weight_hh{suffix}")
                norm = float(torch.linalg.matrix_norm(wide(weight.detach()), 2))
                found.append((norm < 1.0, f"{label}||W{suffix}||={norm:.3g}"))
            elif isinstance(part, nn.LSTM | nn.LSTMCell) and not getattr(part, "proj_size", 0):
                # An upper layer reads h of the one below, which is smaller than 1.
                bound = largest.get(part, float("inf")) if suffix in ("", "_l0") else 1.0
                found.append(_lstm_condition(part, suffix, bound, label))
            else:
                return None, f"no sufficient condition is known for {type(part).__name__}"
    if not found:
        return None, f"no sufficient condition is known for {type(module).__name__}"
    return all(ok for ok, _ in found), "; ".join(text for _, text in found)


def _lstm_condition(part: nn.Module, suffix: str, largest: float, label: str) -> tuple[bool, str]:
    w_i, w_f, w_z, w_o = wide(getattr(part, f"weight_hh{suffix}").detach()).chunk(4)
    reach = w_f.abs().sum(dim=1)
    reach += largest * wide(getattr(part, f"weight_ih{suffix}").detach()).chunk(4)[1].abs().sum(1)
    if getattr(part, "bias", False) is not False:
        for bias in (f"bias_ih{suffix}", f"bias_hh{suffix}"):
            reach += wide(getattr(part, bias).detach()).chunk(4)[1]
    gap = 1.0 - float(torch.sigmoid(reach.max()))
    i, f, z, o = (float(w.abs().sum(dim=1).max()) for w in (w_i, w_f, w_z, w_o))
    ok = i < gap and o < gap and z <= gap / 4 and f < gap**2
    return ok, (
        f"{label}layer{suffix}: forget gate up to {1 - gap:.3g}, ||W_i||={i:.3g}, "
        f"||W_f||={f:.3g}, ||W_z||={z:.3g}, ||W_o||={o:.3g}"
    )


def _layers(part: nn.Module) -> list[str]:
    if isinstance(part, nn.RNNBase):
        return [f"_l{i}" for i in range(part.num_layers)]
    return [""] if isinstance(part, nn.RNNCellBase) else []


@contextmanager
def _largest_inputs(module: nn.Module) -> Iterator[dict[nn.Module, float]]:
    """Note the largest |x| given to each recurrent part while the block runs."""
    largest: dict[nn.Module, float] = {}

    def note(part: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        x = args[0] if args else named["input"]
        largest[part] = max(largest.get(part, 0.0), float(x.abs().max()))

    handles = [
        m.register_forward_pre_hook(note, with_kwargs=True) for m in module.modules() if _layers(m)
    ]
    try:
        yield largest
    finally:
        for handle in handles:
            handle.remove()


def _row_products(recurrent: Recurrent, a: State, b: State) -> Tensor:
    pairs = zip(recurrent.components(a).values(), recurrent.components(b).values(), strict=True)
    return torch.stack([(wide(x) * wide(y)).sum(dim=1) for x, y in pairs]).sum(dim=0)


def _row_norms(recurrent: Recurrent, state: State) -> Tensor:
    return _row_products(recurrent, state, state).sqrt()


def _normalise(recurrent: Recurrent, state: State) -> State:
    norms = _row_norms(recurrent, state)
    return _times(recurrent, state, 1.0 / torch.where(norms > 0.0, norms, 1.0))


def _times(recurrent: Recurrent, state: State, factors: Tensor) -> State:
    """Multiply every row of a state by a number of its own."""
    dims = iter(recurrent.known_dims)

    def scale(leaf: Tensor) -> Tensor:
        dim = next(dims)
        if dim is None or not leaf.is_floating_point():
            return torch.zeros_like(leaf)
        return leaf * per_row(factors.to(leaf), leaf, dim)

    return map_leaves(scale, state)
