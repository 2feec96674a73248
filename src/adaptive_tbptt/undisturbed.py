"""Use a model for a measurement and leave it, and the caller's random state, as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from .precision import forget_casts


@contextmanager
def undisturbed(
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
        _fork_random_state(stack, module)
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


def _accelerators(module: nn.Module) -> list[torch.device]:
    devices = {p.device for p in module.parameters()} | {b.device for b in module.buffers()}
    return sorted((d for d in devices if d.type not in ("cpu", "meta")), key=str)


def _fork_random_state(stack: ExitStack, module: nn.Module) -> None:
    accelerators = _accelerators(module)
    if not accelerators:
        stack.enter_context(torch.random.fork_rng(devices=[]))
    for d in accelerators:
        stack.enter_context(torch.random.fork_rng(devices=[d.index or 0], device_type=d.type))


RandomState = list[Tensor]


def random_state_of(module: nn.Module) -> RandomState:
    """Return torch's random state on the CPU and on the devices of a module."""
    others = [torch.get_device_module(d).get_rng_state(d) for d in _accelerators(module)]
    return [torch.get_rng_state(), *others]


def restore_random_state(module: nn.Module, saved: RandomState) -> None:
    """Undo `random_state_of`."""
    torch.set_rng_state(saved[0])
    for d, state in zip(_accelerators(module), saved[1:], strict=True):
        torch.get_device_module(d).set_rng_state(state, d)
