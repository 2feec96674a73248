"""Use a model for a measurement and leave it, and the caller's random state, as they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain

import torch
from torch import Tensor, nn

from .compiling import eager
from .number_formats import flushed_denormals, forget_casts


@contextmanager
def preserve(
    *modules: nn.Module, train: bool | None = None, backward: bool = False
) -> Iterator[None]:
    """Restore train/eval modes, buffers and random states on exit, also after an exception.

    Args:
        modules: the model, and the loss if it is a module.
        train: mode inside the block; None keeps the mode of each module.
        backward: whether a backward pass will run inside.
    """
    parts = [part for module in modules for part in module.modules()]
    modes = [part.training for part in parts]
    buffers = [
        (part, name, b, b.detach().clone())
        for part in parts
        for name, b in part._buffers.items()
        if b is not None
    ]
    random = [random_state_of(module) for module in modules]
    forget_casts()
    try:
        if train is not None:
            for module in modules:
                module.train(train)
        # cuDNN refuses a backward pass through an RNN in eval mode.
        refused = backward and not all(module.training for module in modules)
        with torch.backends.cudnn.flags(enabled=False) if refused else nullcontext():
            yield
    finally:
        for part, training in zip(parts, modes, strict=True):
            part.training = training
        for part, name, tensor, before in buffers:
            part._buffers[name] = tensor
            if not torch.equal(tensor, before):
                with torch.no_grad():
                    tensor.copy_(before)
        forget_casts()
        for module, saved in zip(modules, random, strict=True):
            restore_random_state(module, saved)


@contextmanager
def measuring(modules: Sequence[nn.Module], train: bool | None = None) -> Iterator[None]:
    """Run passes that measure gradients: the modules are preserved, nothing is compiled.

    Gradients are enabled whatever the caller set, and denormals are flushed: the gradient of a
    distant lag is often denormal.

    Args:
        modules: the model first, then others in use, such as a loss with buffers.
        train: mode of the model inside the block; None keeps the mode it is in.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError("inference mode computes no gradients: measure outside of it")
    model, *others = modules
    with (
        preserve(*others),
        preserve(model, train=train, backward=True),
        torch.enable_grad(),
        flushed_denormals(),
        eager(),
    ):
        yield


RandomState = list[Tensor]


def random_state_of(module: nn.Module) -> RandomState:
    """Return torch's random state on the CPU and on the accelerators that hold the module."""
    others = [torch.get_device_module(d).get_rng_state(d) for d in _accelerators_of(module)]
    return [torch.get_rng_state(), *others]


def restore_random_state(module: nn.Module, saved: RandomState) -> None:
    """Undo `random_state_of`."""
    torch.set_rng_state(saved[0])
    for d, state in zip(_accelerators_of(module), saved[1:], strict=True):
        torch.get_device_module(d).set_rng_state(state, d)


def _accelerators_of(module: nn.Module) -> list[torch.device]:
    devices = {tensor.device for tensor in chain(module.parameters(), module.buffers())}
    return sorted((d for d in devices if d.type not in ("cpu", "meta")), key=str)
