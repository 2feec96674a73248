"""c_k: what lag k contributes to the gradient of a loss with respect to the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]


GROUPS = 8  # independent groups of rows per probe; with them one sketch per row need not be kept


def group_edges(samples: int) -> NDArray[np.int64]:
    """Return where the groups of so many samples begin, and the end of the last."""
    return np.linspace(0, samples, min(GROUPS, samples) + 1).astype(np.int64)


@dataclass(frozen=True)
class Contributions:
    """The contributions of lags k = 0..lags-1 to the parameter gradients of sampled losses.

    The gradient truncated at K is the sum of c_0..c_K. Lag 0 is the step that carries the loss,
    readout included.

    Attributes:
        norms: `(lags, samples)`, ||c_k|| of every sample.
        sketches: `(lags, groups, m)`, sketches of c_k summed over the samples of a group; see
            `sketch.py`. Empty, m = 0, where they were not asked for.
        sizes: `(groups,)`, samples of each group. Groups are independent of each other.
    """

    norms: Array
    sketches: NDArray[np.float32] = field(repr=False)
    sizes: NDArray[np.int64]

    @property
    def lags(self) -> int:
        """Number of lags."""
        return len(self.norms)

    @property
    def mean(self) -> Array:
        """`(lags,)`: E ||c_k||."""
        return self.norms.mean(axis=1)

    def scaled(self, factor: float) -> Contributions:
        """Return those of a loss that is `factor` times this one's."""
        sketches = (self.sketches * np.float32(factor)).astype(np.float32)
        return replace(self, norms=self.norms * factor, sketches=sketches)

    def merged(self) -> Contributions:
        """Return the same as one group: an eighth of the memory, where there are others."""
        return replace(
            self,
            sketches=self.sketches.sum(axis=1, keepdims=True),
            sizes=self.sizes.sum(keepdims=True),
        )

    def silent(self, samples: int) -> Contributions:
        """Return those of so many samples without a loss."""
        sizes = np.diff(group_edges(samples))
        nothing = np.zeros((self.lags, len(sizes), self.sketches.shape[2]), np.float32)
        return Contributions(np.zeros((self.lags, samples)), nothing, sizes)

    def to_dict(self) -> dict[str, Tensor]:
        """Return tensors, for a checkpoint."""
        return {name: torch.from_numpy(value) for name, value in vars(self).items()}

    @staticmethod
    def from_dict(saved: dict[str, Tensor]) -> Contributions:
        """Undo `to_dict`."""
        return Contributions(**{name: value.cpu().numpy() for name, value in saved.items()})

    @staticmethod
    def concatenate(parts: Sequence[Contributions]) -> Contributions:
        """Join those of the same model at the same parameters."""
        return Contributions(
            np.concatenate([p.norms for p in parts], axis=1),
            np.concatenate([p.sketches for p in parts], axis=1),
            np.concatenate([p.sizes for p in parts]),
        )
