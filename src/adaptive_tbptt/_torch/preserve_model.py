"""Use a model for a measurement and leave it, and the caller's random state, as they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from .compiling import eager
from .number_formats import flushed_denormals, forget_casts


@contextmanager
def preserve(
    module: nn.Module, train: bool | None = None, *, backward: bool = False
) -> Iterator[None]:
    """Restore train/eval modes, buffers and random states on exit, also after an exception.

    Args:
        module: the model that is about to be used.
        train: mode inside the block; None keeps the mode the model is in.
        backward: whether a backward pass will run inside.
    """
    modes = [(m, m.training) for m in module.modules()]
    buffers = [
        (m, name, b, b.detach().clone())
        for m in module.modules()
        for name, b in m._buffers.items()
        if b is not None
    ]
    with ExitStack() as stack:
        stack.enter_context(forked_random_state(module))
        forget_casts()
        stack.callback(forget_casts)
        try:
            if train is not None:
                module.train(train)
            if backward and not module.training:
                # cuDNN refuses a backward pass through an RNN in eval mode.
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            yield
        finally:
            for m, training in modes:
                m.training = training
            for m, name, tensor, before in buffers:
                m._buffers[name] = tensor
                if not torch.equal(tensor, before):
                    with torch.no_grad():
                        tensor.copy_(before)


@contextmanager
def measuring(modules: Sequence[nn.Module], train: bool | None = None) -> Iterator[None]:
    """Run passes that measure gradients: the modules are preserved, nothing is compiled.

    Gradients are enabled whatever the caller set, and denormals are flushed: the gradient of a
    distant lag is often denormal.

    Args:
        modules: the model, and others that are used, such as a loss with buffers.
        train: mode of the model inside the block; None keeps the mode it is in.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError("inference mode computes no gradients: measure outside of it")
    with ExitStack() as stack:
        stack.enter_context(preserve(modules[0], train, backward=True))
        for other in modules[1:]:
            stack.enter_context(preserve(other))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(flushed_denormals())
        stack.enter_context(eager())
        yield


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the module's first parameter or buffer; the CPU if it has neither."""
    first = next(chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def accelerators_of(module: nn.Module) -> list[torch.device]:
    """Return the devices other than the CPU that hold parts of the module."""
    devices = {tensor.device for tensor in chain(module.parameters(), module.buffers())}
    return sorted((d for d in devices if d.type not in ("cpu", "meta")), key=str)


RandomState = list[Tensor]


def random_state_of(module: nn.Module) -> RandomState:
    """Return torch's random state on the CPU and on the devices of a module."""
    others = [torch.get_device_module(d).get_rng_state(d) for d in accelerators_of(module)]
    return [torch.get_rng_state(), *others]


def restore_random_state(module: nn.Module, saved: RandomState) -> None:
    """Undo `random_state_of`."""
    torch.set_rng_state(saved[0])
    for d, state in zip(accelerators_of(module), saved[1:], strict=True):
        torch.get_device_module(d).set_rng_state(state, d)


@contextmanager
def forked_random_state(module: nn.Module) -> Iterator[None]:
    """Give the block random states of its own on the CPU and on the module's accelerators."""
    accelerators = accelerators_of(module)
    with ExitStack() as stack:
        if not accelerators:
            stack.enter_context(torch.random.fork_rng(devices=[]))
        for d in accelerators:
            stack.enter_context(torch.random.fork_rng(devices=[d.index or 0], device_type=d.type))
        yield
