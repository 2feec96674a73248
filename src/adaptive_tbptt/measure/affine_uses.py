"""Where parameters enter: the gradient of an affine map at one step is an outer product.

So its norm is a product of norms, and nothing of the size of a parameter is formed. A parameter
that is used twice in a step (an embedding that is also the output matrix) has a cross term, which
is a product of two inner products.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .._torch.number_formats import wide
from ..data.nest import leaves


class NotAffine(Exception):
    """A parameter enters in a way that is not known here; the general path is to be taken."""


class Use(NamedTuple):
    """One use of a parameter at every step of every row: its gradient is `left` times `right`^T.

    Attributes:
        parameter: which one, `(p, q)` or `(p,)`.
        left: `(steps, rows, p)`, or `(steps, rows)` of integers that stand for one-hot vectors.
        right: `(steps, rows, q)`, or integers likewise; None for a vector, whose gradient is
            `left`.
    """

    parameter: Tensor
    left: Tensor
    right: Tensor | None = None


def squared_norms(uses: Iterable[Use]) -> Tensor:
    """Return `(steps, rows)`: the squared norm of the gradient that one or more uses make up."""
    by_parameter: dict[int, list[Use]] = defaultdict(list)
    squares: dict[int, Tensor] = {}  # of tensors: an LSTM's gates serve four parameters
    for use in uses:
        by_parameter[id(use.parameter)].append(use)

    def square(factor: Tensor | None) -> Tensor | float:
        if factor is None or not factor.is_floating_point():
            return 1.0
        if id(factor) not in squares:
            squares[id(factor)] = _inner(factor, factor)
        return squares[id(factor)]

    total: Any = 0.0
    for same in by_parameter.values():
        for use in same:
            total = total + square(use.left) * square(use.right)
        for a, b in combinations(same, 2):
            right = 1.0 if a.right is None or b.right is None else _inner(a.right, b.right)
            total = total + 2 * _inner(a.left, b.left) * right
    return total.clamp_min(0.0)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Inner products over the last dimension, in float64; integers stand for one-hot vectors."""
    if not a.is_floating_point() and not b.is_floating_point():
        return wide(a == b)
    if not b.is_floating_point():
        a, b = b, a
    if not a.is_floating_point():
        return wide(b.gather(-1, a[..., None])[..., 0])
    # A product of vectors in their own precision would lose what is far below the largest.
    return torch.linalg.vecdot(wide(a), wide(b))


class _Call(NamedTuple):
    """A recorded call: its result, and how a gradient of the result becomes uses."""

    result: Tensor
    version: int
    uses: Callable[[Tensor], list[Use]]


class Recorder(TorchFunctionMode):
    """Notes every affine map with a parameter that is computed inside; refuses anything else.

    Args:
        parameters: those whose uses matter.
        steps: steps that each call is given at once.
        rows: rows of each step.
        batch_first: whether the module lays out rows before steps.
    """

    def __init__(
        self, parameters: Iterable[Tensor], *, steps: int, rows: int, batch_first: bool
    ) -> None:
        super().__init__()
        self._watched = {id(p): p for p in parameters}
        self._turned: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []  # keeps the ids of transposed matrices from being reused
        self._shape = (rows, steps) if batch_first else (steps, rows)
        self._batch_first = batch_first
        self.calls: list[_Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch and note it if a parameter enters."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [x for x in leaves((args, kwargs)) if self._is_parameter(x)]
        # Without gradients something is computed for other ends, such as a log.
        if given and torch.is_grad_enabled() and _is_computed(func, result):
            if any(x.is_complex() for x in leaves(result)):
                raise NotAffine("a parameter enters a complex number")
            self._note(func, args, kwargs, result)
        return result

    def uses(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Use]:
        """Backpropagate to every recorded call and return the uses there."""
        if not self.calls:
            return []
        found = torch.autograd.grad(
            outputs,
            [call.result for call in self.calls],
            gradients,
            allow_unused=True,
            materialize_grads=True,
        )
        return self.from_gradients(found)

    def from_gradients(self, gradients: Iterable[Tensor]) -> list[Use]:
        """Return the uses, given the gradient with respect to the result of every call."""
        if any(call.result._version != call.version for call in self.calls):
            raise NotAffine("what a parameter was used for is changed in place")
        pairs = zip(self.calls, gradients, strict=True)
        return [use for call, gradient in pairs for use in call.uses(gradient)]

    def _is_parameter(self, x: Tensor) -> bool:
        return id(x) in self._watched or id(x) in self._turned

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func in _TURNS and id(args[0]) in self._watched and args[0].dim() == 2:
            self._turned[id(result)] = self._watched[id(args[0])]
            self._kept.append(result)
        elif func is F.linear:
            x, weight, bias = _bind(args, kwargs, "input", "weight", "bias")
            self._only(weight, bias)
            self._call(result, lambda g: self._linear(x, weight, bias, g))
        elif func is F.embedding:
            names = ("input", "weight", "padding_idx", "max_norm", "norm_type")
            bound = _bind(args, kwargs, *names, "scale_grad_by_freq")
            index, weight, padding, limit, _, by_frequency = bound
            if limit is not None or by_frequency:
                raise NotAffine("an embedding whose rows are rescaled")
            self._call(result, lambda g: self._embedding(index, weight, padding, g))
        elif func in _ADDS and not kwargs and len(args) == 2:
            bias = next(x for x in args if isinstance(x, Tensor) and self._is_parameter(x))
            if bias.dim() != 1 or result.dim() < 2:
                raise NotAffine(f"{func}: a parameter of shape {tuple(bias.shape)} is added")
            self._call(result, lambda g: [Use(bias, self._grid(g))])
        else:
            raise NotAffine(f"a parameter enters {getattr(func, '__name__', func)}")

    def _call(self, result: Tensor, uses: Callable[[Tensor], list[Use]]) -> None:
        self.calls.append(_Call(result, result._version, uses))

    def _only(self, weight: Tensor, bias: Tensor | None) -> None:
        if id(weight) in self._turned or (bias is not None and id(bias) in self._turned):
            raise NotAffine("a transposed parameter enters a linear map")

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, g: Tensor) -> list[Use]:
        left, found = self._grid(g), []
        if id(weight) in self._watched:
            found.append(Use(weight, left, self._grid(x.detach())))
        if bias is not None and id(bias) in self._watched:
            found.append(Use(bias, left))
        return found

    def _embedding(
        self, index: Tensor, weight: Tensor, padding: int | None, g: Tensor
    ) -> list[Use]:
        which, gradient = self._grid(index, vector=False), self._grid(g)
        if padding is not None:  # its row is never trained
            gradient = gradient.masked_fill((which == padding % len(weight))[..., None], 0.0)
        if id(weight) in self._turned:
            return [Use(self._turned[id(weight)], gradient, which)]
        return [Use(weight, which, gradient)]

    def _grid(self, x: Tensor, vector: bool = True) -> Tensor:
        """Lay out as `(steps, rows)`, or `(steps, rows, dims)` for vectors."""
        shape = (*self._shape, x.shape[-1]) if vector else self._shape
        if x.numel() != torch.Size(shape).numel():
            raise NotAffine(f"a map is given {tuple(x.shape)}, not one value per step and row")
        x = x.reshape(shape)
        return x.transpose(0, 1) if self._batch_first else x


def _is_computed(func: Any, result: Any) -> bool:
    """Whether a function computes something: attributes of a parameter are asked for as well."""
    if func in _TURNS:
        return True
    name = getattr(func, "__name__", "")
    return bool(leaves(result)) and name not in ("__get__", "detach", "requires_grad_")


def _bind(args: Any, kwargs: Any, *names: str) -> list[Any]:
    given = dict(zip(names, args, strict=False)) | kwargs
    return [given.get(name) for name in names]


_attributes: Any = Tensor  # whose descriptors the stubs do not know


_TURNS = (Tensor.t, torch.t, _attributes.T.__get__, _attributes.mT.__get__)


_ADDS = (Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add)


def trained(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that the gradient is about, tied ones once."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}
