"""Check on data that the state goes in and comes out, and that gradients flow through it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.compiling import eager
from .._torch.number_formats import autocast_format, no_autocast, wide
from .._torch.preserve_model import preserve, random_state_of, restore_random_state
from ..data.nest import Nest, State, leaves, map_leaves, pack, with_gradients
from ..data.segment import Segment
from .finding import Finding
from .objective import Objective
from .recurrent import Recurrent

STEPS = 8  # arbitrary: enough for every part of a state to reach the outputs
SHIFT = 0.1  # arbitrary: well above rounding, and below one step of a counter


def state_hides_tensors(objective: Objective, segment: Segment) -> Finding | None:
    """Look for objects in the state that hold tensors where the library does not see them."""
    recurrent = objective.recurrent
    inputs = recurrent.place(segment.between(0, 1).inputs)
    with preserve(recurrent.module, train=False), torch.no_grad(), eager():
        state = recurrent.core(inputs, None)[1]
    for item in pack(state):
        if _holds_tensors(item):
            return Finding(
                f"the state of {recurrent.name} holds a {type(item).__name__}, whose tensors the "
                "library cannot detach, copy or reset: return them as a tuple, list, dict or "
                "dataclass instead",
                fatal=True,
            )
    return None


def _holds_tensors(item: Any) -> bool:
    inside = getattr(item, "__dict__", None)
    return not isinstance(item, Tensor) and isinstance(inside, dict) and bool(leaves(inside))


def calls_remember(objective: Objective, segment: Segment) -> Finding | None:
    """Call the model twice with the same inputs and state: a state kept inside shows."""
    recurrent = objective.recurrent
    inputs = recurrent.place(segment.between(0, STEPS).inputs)
    with preserve(recurrent.module, train=False), torch.no_grad(), eager():
        random = random_state_of(recurrent.module)
        first = map_leaves(Tensor.clone, recurrent.core(inputs, None))
        restore_random_state(recurrent.module, random)
        second = recurrent.core(inputs, None)
    if not any(map(_differ, _numbers(first), _numbers(second))):
        return None
    return Finding(
        f"{recurrent.name} returns something else when it is called again with the same inputs and "
        "the same state: it keeps a state of its own inside, which windows do not reset, detach or "
        "carry. Take the state as an argument and return it, or say where it is: "
        "at.model.as_recurrent(model, state_in=...)"
    )


class _Ran(NamedTuple):
    """A few steps: a copy of the state that entered, what was returned, the state that left."""

    entering: State
    outputs: list[Tensor]
    leaving: State


def state_drops_gradients(objective: Objective, segment: Segment) -> Finding | None:
    """Look for parts of the state that change the outputs, but pass no gradient on.

    Shift a part of the state that enters (h or c of one layer): if the outputs change, the part
    matters. It then needs a gradient where it enters (a kernel must return dh0), and, if it depends
    on the state that entered, where it leaves (a kernel must take the gradient of the last state).

    A caller that disables gradients only predicts, and has nothing to be warned of.
    """
    if not torch.is_grad_enabled():
        return None
    recurrent = objective.recurrent
    inputs = recurrent.place(segment.between(0, STEPS).inputs)
    # In the mode of training: a kernel may be used there alone.
    with preserve(recurrent.module, backward=True), eager():
        recurrent.dims(inputs)  # the layout, which tells the parts of a state
        with torch.no_grad():
            start = recurrent.core(inputs, None)[1]
        random = random_state_of(recurrent.module)

        def run(shifted: str | None = None) -> _Ran:
            restore_random_state(recurrent.module, random)
            return _run(recurrent, inputs, start, shifted)

        plain = run()
        leaving = recurrent.components(plain.leaving)
        reached = _reached(recurrent, [*plain.outputs, *_numbers(plain.leaving)], plain)
        for name in leaving:
            with torch.no_grad():
                moved = run(name)
            if not any(map(_differ, plain.outputs, moved.outputs)):
                continue
            where = f"'{name}' of the state" if len(leaving) > 1 else "the state"
            if name not in reached:
                return _finding(
                    f"no gradient reaches {where} that is passed to {recurrent.name}",
                    "return the gradient of its initial state (dh0)",
                )
            left = leaving[name]
            depends = _differ(left, recurrent.components(moved.leaving)[name])
            if depends and not _reached(recurrent, [left], plain):
                return _finding(
                    f"no gradient flows back through {where} that {recurrent.name} returns",
                    "take the gradient of its last state",
                )
    return None


def _run(recurrent: Recurrent, inputs: Nest, start: State, shifted: str | None) -> _Ran:
    """Run from a copy of a state, one part of which may be shifted."""
    entering = map_leaves(lambda x: x.detach().clone(memory_format=torch.contiguous_format), start)
    if shifted is not None:
        recurrent.components(entering)[shifted].add_(SHIFT)
    else:
        map_leaves(lambda x: x.requires_grad_(x.is_floating_point()), entering)
    outputs, leaving = recurrent.core(inputs, entering)
    return _Ran(entering, _numbers(outputs), leaving)


def _reached(recurrent: Recurrent, of: list[Tensor], ran: _Ran) -> set[str]:
    """Return the parts of the state that entered which a gradient reaches."""
    wanted = [x for x in leaves(ran.entering) if x.requires_grad]
    outputs = [x for x in of if x.requires_grad]
    if not wanted or not outputs:
        return set()
    given = [torch.rand_like(x) + 0.5 for x in outputs]
    with no_autocast(outputs[0].device):
        found = torch.autograd.grad(
            outputs, wanted, given, retain_graph=True, allow_unused=True, materialize_grads=True
        )
    parts = recurrent.components(with_gradients(ran.entering, found))
    return {name for name, gradient in parts.items() if gradient.any()}


def _finding(what: str, needed: str) -> Finding:
    return Finding(
        f"{what}, though the outputs depend on it. What flows through it is missing from every "
        "gradient, so truncation looks less biased than it is. If a fused kernel drops it, the "
        f"kernel must {needed}. Ignore this if you detach it on purpose"
    )


def _numbers(nest: Nest) -> list[Tensor]:
    return [x for x in leaves(nest) if x.is_floating_point() or x.is_complex()]


def _differ(a: Tensor, b: Tensor) -> bool:
    """Whether two results differ by more than rounding; 1e-4 is arbitrary."""
    if a.shape != b.shape:
        return True
    eps = max(torch.finfo(f).eps for f in (a.dtype, autocast_format(a.device) or a.dtype))
    change, size = wide((a - b).abs()).max(), wide(a.abs()).max()
    return bool(change > max(4 * eps, 1e-4) * size)
