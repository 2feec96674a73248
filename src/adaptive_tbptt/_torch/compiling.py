"""torch.compile: which parts of a model run compiled, and which passes run as they are."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def plain(module: nn.Module) -> nn.Module:
    """Return the module inside what `torch.compile(module)` returned, or the module itself."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module


def compiled_parts(module: nn.Module, *names: str) -> dict[str, Callable[..., Any]]:
    """Compile methods of a compiled module, with the module's own options.

    `torch.compile(module)` compiles `forward` alone: `core` and `head` would run uncompiled.
    """
    inner = plain(module)
    if inner is not module:
        compile_like: Any = module.dynamo_ctx
        return {name: compile_like(getattr(inner, name)) for name in names}
    if module._compiled_call_impl is not None:
        warnings.warn(
            f"{type(module).__name__}.compile() compiles forward, but {' and '.join(names)} run "
            "in its place: use torch.compile(model), or compile these methods",
            UserWarning,
            stacklevel=4,
        )
    return {}


@contextmanager
def eager(wanted: bool = True) -> Iterator[None]:
    """Run compiled functions uncompiled inside the block.

    Every new shape costs a compilation, and after eight of them torch stops compiling a function.
    Windows of the usual size repeat. The shapes of probe steps, of the two rows that reveal a
    state's layout, of catch-up steps and of an epoch's last window do not.
    """
    stance = getattr(torch.compiler, "set_stance", None)  # from torch 2.6 on
    if not wanted or stance is None or "torch._dynamo" not in sys.modules:
        yield
        return
    with stance("force_eager"):
        yield
