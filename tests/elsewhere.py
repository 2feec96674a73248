"""A device that is not the CPU, for machines that have no other.

Tensors "elsewhere" hold their numbers on the CPU but say they are on another device. An operation
that mixes them with tensors of the CPU is refused, as a GPU would refuse it, and so is numpy.
"""

import types
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adaptive_tbptt._torch.number_formats import NO_FLOAT64

aten = torch.ops.aten
CPU = torch.device("cpu")


def _register():
    """Make `elsewhere` a device type that torch knows by name; its random state is the CPU's."""
    module = types.ModuleType("torch.elsewhere")
    module.is_available = lambda: False  # or torch.compile would ask it for its streams
    module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    torch.utils.rename_privateuse1_backend("elsewhere")
    torch._register_device_module("elsewhere", module)
    return torch.device("elsewhere", 0)


ELSEWHERE = _register()


class Elsewhere(torch.Tensor):
    """A tensor elsewhere."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, layout=inner.layout, device=CPU,
        )  # fmt: skip

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return f"Elsewhere({self.inner!r})"

    @property
    def device(self):
        return ELSEWHERE

    def to(self, *args, **kwargs):
        if isinstance(args[0], torch.Tensor):
            device, dtype = args[0].device, args[0].dtype
        else:
            device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype = device or ELSEWHERE, dtype or self.dtype
        if (device, dtype) == (ELSEWHERE, self.dtype):
            return self
        return aten._to_copy.default(self, device=device, dtype=dtype)

    def cpu(self):
        return self.to(CPU)

    def item(self):
        return self.inner.item()

    def tolist(self):
        return self.inner.tolist()

    def __float__(self):
        return float(self.inner)

    def __int__(self):
        return int(self.inner)

    def __bool__(self):
        return bool(self.inner)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to and not isinstance(args[0], cls):  # x.to(a tensor elsewhere)
            return args[0].to(ELSEWHERE, args[1].dtype)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _map(change, arguments):
    """Change what operators take and return: values, and lists of them."""
    if isinstance(arguments, (list, tuple)):
        return type(arguments)([_map(change, x) for x in arguments])
    return change(arguments)


def _inner(leaf):
    return leaf.inner if isinstance(leaf, Elsewhere) else leaf


def _outer(leaf):
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.dtype is torch.float64 and ELSEWHERE.type in NO_FLOAT64:
        raise TypeError("this device has no float64")
    return Elsewhere(leaf)


def _run(func, args, kwargs):
    """Compute on the CPU, and say where the result is."""
    tensors = []
    _map(
        lambda x: tensors.append(x) if isinstance(x, torch.Tensor) else None,
        [args, *kwargs.values()],
    )
    there = [x for x in tensors if isinstance(x, Elsewhere)]
    moves = func in (aten._to_copy.default, aten.copy_.default)
    # A number in a tensor may come from anywhere, as on a GPU.
    if there and not moves and any(x.dim() for x in tensors if not isinstance(x, Elsewhere)):
        raise RuntimeError(f"{func} got tensors of two devices")
    device = kwargs.get("device")
    plain = {name: _map(_inner, value) for name, value in kwargs.items()}
    if device is not None:
        plain["device"] = CPU
    result = func(*_map(_inner, args), **plain)
    if func is aten._local_scalar_dense.default:
        return result
    if args and isinstance(args[0], Elsewhere) and result is args[0].inner:  # in place
        return args[0]
    if moves or not tensors:
        # Autograd makes its zeros on the CPU: that is where it believes these tensors to be.
        by_autograd = not tensors and torch._C._current_graph_task_id() != -1
        is_there = by_autograd or (device or (CPU, ELSEWHERE)[bool(there)]) == ELSEWHERE
    else:
        is_there = bool(there)
    return _map(_outer, result) if is_there else result


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


@contextmanager
def other_device():
    """Yield a device that takes part in everything while the block lasts."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with torch.backends.mkldnn.flags(enabled=False), _Mode():
            yield ELSEWHERE
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
