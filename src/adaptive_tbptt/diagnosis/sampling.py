"""How `diagnose` and `check_bias` sample: which data, how much of it, in which mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .. import defaults
from ..data.stream import SequenceStream, Stream
from ..estimate.unbiased_norms import groups_needed
from ..measure.sampling import Source
from ..model.objective import Objective
from ..model.recurrent import Recurrent

GROUPS = 32  # more groups make the intervals themselves less noisy, and cost memory
SIZE = 2**16  # numbers kept per level and group; models with more parameters are sketched


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    Attributes:
        samples: losses to probe at least, a whole batch at a time.
        burn_in: steps that warm up the state before a measurement; 20 as in the release.
        train: mode of the model; None keeps its mode.
        level: coverage of the intervals.
        seed: of the segments, of the dropout on each, and of any resampling.
    """

    samples: int = defaults.SAMPLES
    burn_in: int = defaults.BURN_IN
    train: bool | None = None
    level: float = defaults.LEVEL
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.level < 1.0:
            raise ValueError(f"level must be in (0, 1), got {self.level}")

    def require(self, segments: int | None) -> None:
        """Refuse fewer segments than the test of a gradient against noise needs."""
        needed = groups_needed(self.level)
        if segments is not None and segments < needed:
            raise ValueError(
                f"it takes at least {needed} segments to tell a gradient from noise at level "
                f"{self.level:g}, got {segments}"
            )

    def source(self, objective: Objective, stream: Stream) -> Source:
        """Return where measurements come from."""
        return Source(
            objective,
            stream,
            self.burn_in,
            torch.Generator().manual_seed(self.seed),
            train=self.train,
            seed=self.seed,
        )


def as_stream(data: Any, recurrent: Recurrent) -> Stream:
    """Return a stream; a pair `(inputs, targets)` is laid out as the model takes it."""
    if isinstance(data, Stream):
        return data
    if not isinstance(data, tuple | list) or len(data) not in (2, 3):
        raise TypeError(
            "expected a stream or a pair (inputs, targets) of tensors, got "
            f"{type(data).__name__}; wrap chunks in ChunkStream(loader)"
        )
    return SequenceStream(*data, batch_first=recurrent.batch_first)
