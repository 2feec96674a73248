"""Read sequences from what people have: lists, nests, NumPy, pandas, PackedSequence, a Dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, unpack_sequence
from torch.utils.data import Dataset

from .nest import Nest, leaf_label, leaves, map_leaves, named_leaves
from .sequences import Sequences, join

PARTS = ("inputs", "targets", "static")
EXPECTED = "a sequence is (inputs, targets) or (inputs, targets, static)"


def as_tensor(value: Any, name: str) -> Tensor:
    """Return a tensor; NumPy's and pandas' floating-point numbers take torch's default format."""
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "to_numpy"):  # pandas, which need not be installed
        value = value.to_numpy()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{name}: expected a tensor or an array, got {type(value).__name__}")
    if value.dtype.kind not in "fiub":
        raise TypeError(
            f"{name}: expected numbers, got an array of {value.dtype}; leave out columns of dates "
            "or text, or turn them into numbers"
        )
    return torch.tensor(value, dtype=torch.get_default_dtype() if value.dtype.kind == "f" else None)


def read_sequences(given: Iterable[Any]) -> Sequences:
    """Read and check sequences; `SequenceStream.from_sequences` says what may be given."""
    items = list(_items(given))
    if not items:
        raise ValueError("there are no sequences")
    for index, item in enumerate(items):
        if len(item) != len(items[0]):
            raise ValueError(
                f"sequence {index} has {len(item)} parts, sequence 0 has {len(items[0])}: "
                f"{EXPECTED}"
            )
    parts = [list(part) for part in zip(*items, strict=True)]
    for what, nests in zip(PARTS, parts, strict=False):
        _check_alike(what, nests)
    inputs, targets = parts[:2]
    lengths = [
        _steps(x, y, index) for index, (x, y) in enumerate(zip(inputs, targets, strict=True))
    ]
    static = None
    if len(parts) == 3:
        _check_joinable(inputs[0], parts[2][0])
        static = parts[2]
    return join(inputs, targets, static, lengths)


def _items(given: Iterable[Any]) -> Iterator[list[Nest]]:
    """Yield the parts of every sequence, as nests of tensors."""
    if isinstance(given, tuple) and given and isinstance(given[0], PackedSequence):
        given = [given]
    if isinstance(given, Dataset) and isinstance(given, Sized):
        given = map(given.__getitem__, range(len(given)))
    index = 0
    for item in given:
        if not isinstance(item, tuple | list) or len(item) not in (2, 3):
            raise TypeError(f"{EXPECTED}, got {_describe(item)} for sequence {index}")
        for parts in _unpacked(item):
            named = zip(PARTS, parts, strict=False)
            yield [_as_tensors(part, f"{what} of sequence {index}") for what, part in named]
            index += 1


def _as_tensors(nest: Nest, name: str) -> Nest:
    return map_leaves(lambda leaf: as_tensor(leaf, name), nest, tensors_only=False)


def _describe(item: Any) -> str:
    if isinstance(item, tuple | list):
        return f"{len(item)} parts"
    shape = f" of shape {tuple(item.shape)}" if hasattr(item, "shape") else ""
    return f"one {type(item).__name__}{shape}"


def _unpacked(item: Any) -> Iterator[Any]:
    """Yield the sequences of an item: one, or those of a `PackedSequence`."""
    inputs, targets, *static = item
    if not isinstance(inputs, PackedSequence):
        yield item
        return
    if not isinstance(targets, PackedSequence):
        raise TypeError(
            f"the inputs are a PackedSequence, the targets a {type(targets).__name__}: pack both"
        )
    pairs = zip(unpack_sequence(inputs), unpack_sequence(targets), strict=True)
    for row, (x, y) in enumerate(pairs):
        yield x, y, *(map_leaves(lambda leaf, row=row: leaf[row], nest) for nest in static)


def _check_alike(what: str, nests: list[Nest]) -> None:
    """Refuse sequences that differ in more than their number of steps."""
    time = int(what != "static")
    first = list(named_leaves(nests[0]))
    for index, nest in enumerate(nests):
        own = list(named_leaves(nest))
        if not own:
            raise TypeError(f"the {what} of sequence {index} hold no tensor: {EXPECTED}")
        if [name for name, _ in own] != [name for name, _ in first]:
            raise ValueError(
                f"the {what} of sequence {index} have leaves {_names(own)}, those of sequence 0 "
                f"{_names(first)}: all sequences need the same"
            )
        for (name, leaf), (_, like) in zip(own, first, strict=True):
            label = f"the {what} of sequence {index}{leaf_label(name)}"
            if leaf.dim() < time:
                raise ValueError(
                    f"{label} have shape (): their first axis must be time. For one target per "
                    "sequence, repeat it at every step, or mask all steps but the last"
                )
            if (leaf.shape[time:], leaf.dtype) != (like.shape[time:], like.dtype):
                expected = ("time", *like.shape[1:]) if time else tuple(like.shape)
                raise ValueError(
                    f"{label} have shape {tuple(leaf.shape)} and type {leaf.dtype}; expected "
                    f"({', '.join(map(str, expected))}) and {like.dtype}, as in sequence 0"
                )


def _steps(inputs: Nest, targets: Nest, index: int) -> int:
    """Return the number of steps of a sequence; refuse leaves that differ in it."""
    steps = leaves(inputs)[0].shape[0]
    for what, nest in (("inputs", inputs), ("targets", targets)):
        for name, leaf in named_leaves(nest):
            if leaf.shape[0] != steps or steps == 0:
                label = f"the {what} of sequence {index}{leaf_label(name)}"
                raise ValueError(
                    f"{label} have shape {tuple(leaf.shape)}: expected {steps or 'at least 1'} "
                    "steps along the first axis, time"
                )
    return steps


def _check_joinable(inputs: Nest, static: Nest) -> None:
    """Refuse static inputs that the inputs have no place for."""
    if isinstance(inputs, dict):
        if "static" in inputs:
            raise ValueError("the inputs have an entry 'static' already: give it another name")
        return
    both = isinstance(inputs, Tensor) and isinstance(static, Tensor)
    if not both or inputs.dim() != 2 or static.dim() != 1 or inputs.dtype != static.dtype:
        shapes = [[(tuple(x.shape), x.dtype) for x in leaves(nest)] for nest in (inputs, static)]
        raise ValueError(
            f"static {shapes[1]} cannot become further features of inputs {shapes[0]}: that takes "
            "(time, features) and (features,) of one number format. Pass the inputs as a dict, "
            "such as {'x': inputs}; your model then finds static as its entry 'static'"
        )


def _names(named: list[tuple[str, Tensor]]) -> str:
    return ", ".join(f"'{name}'" for name, _ in named)
