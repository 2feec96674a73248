"""Sketch gradients of any size as vectors of bounded size that keep inner products.

A gradient of up to `size` numbers is kept as it is. A larger one is multiplied by random signs and
folded: coordinate i is added to coordinate i modulo p, the largest prime up to `size`. This keeps
inner products in expectation over the signs; the error of one is about |a| |b| / sqrt(p). Why a
prime: layer widths are often powers of two, and modulo a power of two a whole column of a matrix
would fall on a few coordinates.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ..data.nest import as_real

Gradient = Sequence[Tensor | None]
"""One tensor per parameter; None if no gradient reaches it."""


class Fold:
    """The sketch of one model: the same map for every gradient, so that sketches can be added.

    Args:
        parameters: by name; the signs depend only on the name, so every process draws the same.
        size: numbers to keep.
    """

    def __init__(self, parameters: dict[str, Tensor], size: int) -> None:
        if size < 16:  # arbitrary: the error of a norm would exceed a quarter
            raise ValueError(f"size must be at least 16, got {size}")
        self.numbers = sum(_numbers(p) for p in parameters.values())
        self.size = self.numbers if self.numbers <= size else _prime_up_to(size)
        self._parameters = parameters
        self._signs: dict[str, Tensor] = {}

    @property
    def is_exact(self) -> bool:
        """Whether gradients are kept as they are."""
        return self.size == self.numbers

    def add(self, gradient: Gradient, total: Tensor, factor: float = 1.0) -> None:
        """Add `factor` times a gradient to the vector `total`, `(size,)` on the CPU."""
        start = 0
        for (name, parameter), raw in zip(self._parameters.items(), gradient, strict=True):
            if raw is not None:
                flat = as_real(raw.detach().to_dense()).reshape(-1).to(total.dtype)
                if not self.is_exact:
                    flat = flat * self._drawn(name, flat)
                self._put(flat * factor, start, total)
            start += _numbers(parameter)

    def _put(self, flat: Tensor, start: int, total: Tensor) -> None:
        if self.is_exact:
            total[start : start + len(flat)] += flat.to(total)
            return
        first = start % self.size
        padded = flat.new_zeros(math.ceil((first + len(flat)) / self.size) * self.size)
        padded[first : first + len(flat)] = flat
        total += padded.view(-1, self.size).sum(dim=0).to(total)

    def _drawn(self, name: str, like: Tensor) -> Tensor:
        """Return the random signs of a parameter, as bytes: a quarter of a gradient's memory."""
        known = self._signs.get(name)
        if known is None or known.device != like.device:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            bits = torch.randint(2, like.shape, generator=generator, dtype=torch.int8)
            known = self._signs[name] = (2 * bits - 1).to(like.device)
        return known


def _numbers(parameter: Tensor) -> int:
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _prime_up_to(number: int) -> int:
    """Return the largest prime that is at most `number`."""
    while any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1)):
        number -= 1
    return number
