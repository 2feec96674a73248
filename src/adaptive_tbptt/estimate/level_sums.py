"""Gradients by level, summed over groups of segments: all that the measured bias needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def levels_up_to(lags: int, *further: int) -> tuple[int, ...]:
    """Return the contexts 0, 1, 2, 4, ... below `lags`, `lags` itself, and any further ones.

    >>> levels_up_to(20, 3)
    (0, 1, 2, 3, 4, 8, 16, 20)
    """
    powers = {1 << i for i in range(max(lags, 1).bit_length())}
    return tuple(sorted({0, *powers, *further, lags} & set(range(lags + 1))))


@dataclass(frozen=True)
class LevelSums:
    """What each level adds to the parameter gradient of a training window.

    A window carries K2 losses after a context. Level 0 is the gradient without context; level j is
    what the steps between contexts c_{j-1} and c_j add. The sum of levels 0..j is the gradient of a
    window with context c_j.

    Attributes:
        contexts: 0 = c_0 < c_1 < ... < c_J.
        vectors: `(groups, levels, size)`, gradients summed over the losses of each group; sketched
            if the model has more than `size` parameters.
        counts: `(groups,)`, losses of each group. Groups are independent of each other.
        losses: K2, the steps of a window that carry a loss.
        unreached: names of parameters that no gradient reached at any level.
    """

    contexts: tuple[int, ...]
    vectors: NDArray[np.float32] = field(repr=False)
    counts: Array = field(repr=False)
    losses: int
    unreached: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        levels = self.vectors.shape[1]
        if levels != len(self.contexts) or self.contexts[0] != 0:
            raise ValueError(f"expected {levels} contexts that begin with 0, got {self.contexts}")

    @property
    def lags(self) -> int:
        """The longest context, the reference for all shorter ones."""
        return self.contexts[-1]

    @property
    def groups(self) -> int:
        """Number of independent groups."""
        return len(self.counts)

    @property
    def size(self) -> int:
        """Numbers kept per level and group."""
        return int(self.vectors.shape[2])

    @property
    def samples(self) -> int:
        """Losses that were backpropagated."""
        return int(self.counts.sum())

    def slow_part(self, beta: float) -> str | None:
        """Return None: levels do not distinguish parts of the state."""
        return None

    def newest(self, groups: int) -> LevelSums:
        """Return the last `groups` groups."""
        start = max(self.groups - groups, 0)
        return replace(self, vectors=self.vectors[start:], counts=self.counts[start:])

    @staticmethod
    def concatenate(parts: Sequence[LevelSums]) -> LevelSums:
        """Join the groups of several measurements of the same model; older ones come first."""
        first = parts[0]
        if any((p.contexts, p.losses) != (first.contexts, first.losses) for p in parts):
            raise ValueError("measurements to join must have the same contexts and losses")
        return LevelSums(
            first.contexts,
            np.concatenate([p.vectors for p in parts]),
            np.concatenate([p.counts for p in parts]),
            first.losses,
            tuple(n for n in first.unreached if all(n in p.unreached for p in parts)),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values and arrays."""
        return {**vars(self), "contexts": list(self.contexts), "unreached": list(self.unreached)}

    @staticmethod
    def from_dict(saved: dict[str, Any]) -> LevelSums:
        """Undo `to_dict`."""
        lists = {name: tuple(saved[name]) for name in ("contexts", "unreached")}
        return LevelSums(**{**saved, **lists})
