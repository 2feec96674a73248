"""A random linear map from gradients to a few hundred numbers that keeps inner products.

For a matrix W of p by q it is u_i^T W v_i for i = 1..m, with random signs u_i and v_i: of an outer
product that is (u_i . left)(v_i . right), so a gradient at one lag of one row costs two products
with narrow matrices and nothing of the size of a parameter is formed. Inner products are kept in
expectation; the error of a squared norm is a fraction sqrt(2 / m) of it, and at most sqrt(8 / m),
for a single outer product. Where the vectors are noisy means the map adds little to the noise once
m exceeds the number of directions that the noise has.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from .affine_uses import Use

CHUNK = 2**19  # numbers that are sketched at once: what a cache holds


class Sketch:
    """The map for one model; the same for every gradient, so sketches can be added and compared.

    Args:
        parameters: by name, each `(p, ...)`; further dimensions are flattened.
        size: m.
    """

    def __init__(self, parameters: dict[str, Tensor], size: int) -> None:
        if size < 1:
            raise ValueError(f"the size of a sketch must be at least 1, got {size}")
        self.size = size
        self._names = {id(p): name for name, p in parameters.items()}
        self._parameters = list(parameters.values())
        self._dtype = _format(self._parameters)
        self._signs: dict[str, Tensor] = {}

    def is_of(self, parameters: dict[str, Tensor]) -> bool:
        """Whether this is the map for these very parameters."""
        same = [id(p) for p in self._parameters] == [id(p) for p in parameters.values()]
        return same and self._dtype == _format(parameters.values())

    def uses(self, uses: Sequence[Use]) -> Iterator[Tensor]:
        """Yield `(steps, rows, m)` for a few steps at a time: the gradient of every row there."""
        steps, rows = uses[0].left.shape[:2]
        few = max(1, CHUNK // (rows * self.size))
        for start in range(0, steps, few):
            cut: dict[int, Tensor] = {}  # one slice for all uses of a tensor

            def part(x: Tensor, start: int = start, cut: dict[int, Tensor] = cut) -> Tensor:
                return cut.setdefault(id(x), x[start : start + few])

            yield self._of_steps(
                [
                    Use(u.parameter, part(u.left), u.right if u.right is None else part(u.right))
                    for u in uses
                ]
            )

    def _of_steps(self, uses: Sequence[Use]) -> Tensor:
        # Uses that share a left factor, such as the gates of an LSTM, are one wide matrix.
        grouped: dict[tuple[int, int], list[Use]] = {}
        for use in uses:
            grouped.setdefault((id(use.left), len(use.parameter)), []).append(use)
        total: Tensor | None = None
        for same in grouped.values():
            left = _product(same[0].left, self._left(same[0].parameter))
            right = functools.reduce(torch.add, [self._right_of(use) for use in same])
            total = left * right if total is None else total.addcmul_(left, right)
        assert total is not None
        return total / math.sqrt(self.size)

    def dense(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return `(m,)`: a gradient given in full, one tensor per parameter."""
        total = self._parameters[0].new_zeros(self.size, dtype=self._dtype)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is not None:
                signs = self._left(parameter)
                left = signs.t() @ gradient.to(self._dtype).reshape(len(signs), -1)
                total += (left * self._right(parameter).t()).sum(dim=1)
        return total / math.sqrt(self.size)

    def _right_of(self, use: Use) -> Tensor:
        signs = self._right(use.parameter)
        return signs[0] if use.right is None else _product(use.right, signs)

    def _left(self, parameter: Tensor) -> Tensor:
        """Signs `(p, m)`, shared by all parameters of that first dimension."""
        p = parameter.shape[0] if parameter.dim() else 1
        return self._draw(f"left {p}", p, parameter)

    def _right(self, parameter: Tensor) -> Tensor:
        """Signs `(q, m)`, independent for every parameter."""
        q = math.prod(parameter.shape[1:])
        return self._draw(f"right {self._names[id(parameter)]}", q, parameter)

    def _draw(self, key: str, rows: int, like: Tensor) -> Tensor:
        if key not in self._signs or self._signs[key].device != like.device:
            generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            bits = torch.randint(2, (rows, self.size), generator=generator, dtype=torch.int8)
            self._signs[key] = (2 * bits - 1).to(like.device, self._dtype)
        return self._signs[key]


def _format(parameters: Iterable[Tensor]) -> torch.dtype:
    """The widest of the parameters' formats, and no narrower than float32: sums overflow there."""
    return functools.reduce(torch.promote_types, [p.dtype for p in parameters], torch.float32)


def _product(factor: Tensor, signs: Tensor) -> Tensor:
    """Return `factor @ signs`; integers stand for one-hot vectors."""
    return factor.to(signs.dtype) @ signs if factor.is_floating_point() else signs[factor]
