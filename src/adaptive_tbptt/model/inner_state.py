"""A module whose `forward` takes inputs alone: reach the state that it keeps inside.

The state may live in a layer, such as an `nn.LSTM` that the module calls without a state, or in an
attribute, such as `self.hidden`. Both become a state that goes in and comes out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from .._torch.compiling import plain
from ..data.nest import State


class InnerState:
    """Call a module as `(inputs, state) -> (outputs, state)`, with its state set and read by name.

    Args:
        module: called as `module(inputs)`; it is left as it was.
        names: layers or attributes that hold the state, with dots for those of submodules. A layer
            is called by the module as `(inputs, state) -> (outputs, state)`, once. An attribute is
            set to None for the initial state.
    """

    def __init__(self, module: nn.Module, names: str | Sequence[str]) -> None:
        if plain(module) is not module:
            raise ValueError("state_in= reaches into the module: pass it before torch.compile")
        self.module = module
        self.names = [names] if isinstance(names, str) else list(names)
        self._single = isinstance(names, str)
        self._places = [_find(module, name) for name in self.names]
        if not self._places:
            raise ValueError("state_in names at least one layer or attribute, got none")

    def __call__(self, inputs: Any, state: State) -> tuple[Any, State]:
        """Run the module; None is the state that it starts from by itself."""
        entering = [state] if self._single else state or [None] * len(self.names)
        with ExitStack() as stack:
            left = [
                stack.enter_context(_through(owner, name, one))
                for (owner, name), one in zip(self._places, entering, strict=True)
            ]
            outputs = self.module(inputs)
            found = [_leaving(*item) for item in zip(self._places, left, strict=True)]
        if state is None:
            self._refuse_kept(found)
        return outputs, found[0] if self._single else tuple(found)

    def _refuse_kept(self, found: list[State]) -> None:
        """Refuse a layer whose state the module also keeps: None would then not start anew."""
        kept = {
            f"{path}.{name}" if path else name
            for path, owner in self.module.named_modules()
            for name, value in vars(owner).items()
            if any(value is state for state in found if state is not None)
        }
        for place in sorted(kept - set(self.names)):
            raise ValueError(
                f"{type(self.module).__name__} keeps the state of a layer in '{place}': pass "
                f"state_in='{place}'"
            )


def _find(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule that owns a layer or attribute, and its name there."""
    path, _, last = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
        place = getattr(owner, last)
    except AttributeError:
        layers = [n for n, m in module.named_modules() if isinstance(m, nn.RNNBase)]
        raise ValueError(
            f"{type(module).__name__} has no layer or attribute '{name}' to hold its state"
            + (f"; its recurrent layers: {', '.join(layers)}" if layers else "")
        ) from None
    if isinstance(place, nn.RNNCellBase):
        raise ValueError(
            f"'{name}' is a {type(place).__name__}, which runs once for every step: state_in takes "
            "layers that run over time. Wrap the module so that it takes the state and returns it"
        )
    if getattr(place, "bidirectional", False):
        raise ValueError(f"'{name}' is bidirectional and reads the future: it cannot be truncated")
    return owner, last


@contextmanager
def _through(owner: nn.Module, name: str, state: State) -> Iterator[list[State]]:
    """Put a state in; inside the block the list receives those that leave a layer."""
    left: list[State] = []
    place = getattr(owner, name)
    if isinstance(place, nn.Module):
        with _hooked(place, state, left):
            yield left
        return
    setattr(owner, name, state)
    try:
        yield left
    finally:
        setattr(owner, name, place)


@contextmanager
def _hooked(layer: nn.Module, state: State, left: list[State]) -> Iterator[None]:
    second = list(inspect.signature(layer.forward).parameters)[1:2]

    def enter(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if state is None:  # the module starts as it does by itself
            return None
        if len(args) > 1:
            return (args[0], state, *args[2:]), kwargs
        return args, {**kwargs, **dict.fromkeys(second, state)}

    def leave(_: nn.Module, __: Any, returned: Any) -> None:
        left.append(returned[1] if isinstance(returned, tuple) and len(returned) == 2 else None)

    hooks = [
        layer.register_forward_pre_hook(enter, with_kwargs=True),
        layer.register_forward_hook(leave),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _leaving(place: tuple[nn.Module, str], left: list[State]) -> State:
    """Return the state that one place holds after the call."""
    owner, name = place
    held = getattr(owner, name)
    if not isinstance(held, nn.Module):
        return held
    if len(left) != 1:
        raise ValueError(
            f"state_in='{name}' must run once in a call of the module, over all steps, but ran "
            f"{len(left)} times: wrap the module so that it takes the state and returns it"
        )
    if left[0] is None:
        raise ValueError(
            f"state_in='{name}' must return (outputs, state), as nn.LSTM does; "
            f"{type(held).__name__} does not"
        )
    return left[0]
