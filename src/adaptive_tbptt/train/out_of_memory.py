"""How to tell that an error of torch means that memory ran out."""

from __future__ import annotations

# A GPU's allocator raises torch.OutOfMemoryError, a RuntimeError that says "out of memory". The
# CPU's raises a plain RuntimeError. Its message names the allocator, and says "not enough memory"
# or "can't allocate memory", depending on the platform.
_SIGNS = ("out of memory", "not enough memory", "DefaultCPUAllocator")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an allocator raised this error.

    >>> is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    True
    >>> is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    return any(sign in str(error) for sign in _SIGNS)
