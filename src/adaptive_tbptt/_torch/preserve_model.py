"""Use a model for a measurement and leave it, and the caller's random state, as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from .compiling import eager
from .denormals import flushed_denormals
from .number_formats import forget_casts
from .random_state import forked_random_state


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
def measuring(module: nn.Module, train: bool | None = None) -> Iterator[None]:
    """Run passes that measure gradients: the model is preserved, nothing is compiled.

    Gradients are enabled whatever the caller set, and denormals are flushed: the gradient of a
    distant lag is often denormal.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError("inference mode computes no gradients: measure outside of it")
    with (
        preserve(module, train, backward=True),
        torch.enable_grad(),
        flushed_denormals(),
        eager(),
    ):
        yield
