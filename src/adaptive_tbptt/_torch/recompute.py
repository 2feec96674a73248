"""Run a call again in the backward pass, instead of holding what it computed until then."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .compiling import eager
from .preserve_model import preserve, random_state_of, restore_random_state

Buffer = tuple[nn.Module, str, Tensor]


def run_again(
    module: nn.Module, call: Callable[..., Any], *args: Any, uncompiled: bool = False
) -> Any:
    """Return `call(*args)`, which holds its arguments alone and runs again in the backward pass.

    The second run has the random numbers, the buffers and the autocast of the first, and leaves the
    module and the random state as they are. Its graph is that of a call that holds everything, so
    gradients are equal to the bit. What a module keeps elsewhere than in buffers is not restored.

    `measure.Replay` also runs parts again, but each has a graph of its own: it suits measurements,
    which go part by part, and a loss would have no graph to backpropagate through.

    Args:
        module: the module that `call` runs.
        call: returns a nest of tensors.
        args: nests of tensors; they must not change before the backward pass.
        uncompiled: whether the first run is uncompiled; the second must run the same code.
    """
    again = _Again(module, uncompiled)
    found = checkpoint(
        lambda held: call(*held),
        args,  # as one nest: torch would save tensors among its arguments a second time
        use_reentrant=False,
        preserve_rng_state=False,  # `again` covers every device of the module
        context_fn=lambda: (nullcontext(), again),
    )
    again.keep_changed()
    return found


class _Again:
    """The surroundings of the second run; entered anew by every backward pass."""

    def __init__(self, module: nn.Module, uncompiled: bool) -> None:
        self._module, self._uncompiled = module, uncompiled
        self._random = random_state_of(module)
        self._before = [(*entry, entry[2]._version, entry[2].clone()) for entry in _buffers(module)]
        self._changed: list[Buffer] = []

    def keep_changed(self) -> None:
        """Keep earlier values of those buffers only that the first run changed."""
        self._changed = [
            (part, name, value)
            for part, name, buffer, version, value in self._before
            if part._buffers[name] is not buffer or buffer._version != version
        ]
        self._before = []

    def __enter__(self) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(preserve(self._module))
        self._stack.enter_context(eager(self._uncompiled))
        for part, name, value in self._changed:
            part._buffers[name] = value.clone()
        restore_random_state(self._module, self._random)

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _buffers(module: nn.Module) -> list[Buffer]:
    return [
        (part, name, buffer)
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
