"""Draw random segments of a stream and measure on them. Every estimate goes through here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from .._torch.preserve_model import measuring, preserve
from ..data.nest import detach, slice_steps
from ..data.segment import Segment, check_finite
from ..data.stream import Stream
from ..estimate.lag_profile import LagProfile
from ..estimate.level_sums import LevelSums
from ..model.objective import Objective
from ..model.running import warm_up
from .checks import NOT_REACHED, alive_rows, check_reached, refuse_batch_norm
from .fold import Fold
from .fused_layer import ProbePlan
from .lag_probe import ProbeSettings, probe_segment
from .levels import check_contexts, level_gradients

Flags = NDArray[np.bool_]
Progress = Callable[[int, int], None]


class Processes(Protocol):
    """Processes that measure together, each on its rows, such as `distributed.Ranks`."""

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of some numbers over all processes."""

    def total_array(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the sum of an array over all processes."""

    def join_profiles(
        self, profile: LagProfile | None, alive: Flags, count: float
    ) -> tuple[LagProfile, Flags]:
        """Join the profiles of all processes: one column per row of the whole batch."""


@dataclass(frozen=True)
class Source:
    """Where measurements come from.

    Attributes:
        objective: model and loss.
        stream: the data.
        burn_in: steps that warm up the state before the measurement.
        generator: draws the segments.
        train: mode of the model; None keeps its mode.
        seed: of the dropout of each segment; None continues the caller's random state.
        processes: those that hold further rows; None is this process alone.
        plan: the path that probes of this model take, once a probe has decided it.
    """

    objective: Objective
    stream: Stream
    burn_in: int
    generator: torch.Generator
    train: bool | None = None
    seed: int | None = None
    processes: Processes | None = None
    plan: ProbePlan = field(default_factory=ProbePlan)

    @property
    def warm_up_steps(self) -> int:
        """Steps before the measurement: at least the stream's own, which carry no gradient."""
        return max(self.burn_in, self.stream.burn_in)

    def draw(self, steps: int, losses: int = 1) -> Segment:
        """Draw burn-in plus `steps`, again until the last `losses` steps hold an unmasked loss."""
        for _ in range(100):  # arbitrary: a stream with one loss in twenty fails once in 10^2 runs
            segment = self.stream.random_segment(self.warm_up_steps + steps, self.generator)
            count = self.objective.count_losses(slice_steps(segment.targets, -losses, None))
            if self.processes is not None:
                count = self.processes.total([count])[0]
            if count > 0:
                return segment
        raise ValueError("a hundred random segments held no loss: nearly every target is masked")

    def seeded(self, index: int) -> None:
        """Seed the dropout of segment `index`."""
        if self.seed is not None:
            torch.manual_seed(self.seed + index)


@dataclass(frozen=True)
class LagRequest:
    """Request gradient norms of the state at lags 0..lags, of one loss per row.

    Attributes:
        lags: how far back to measure (R).
        batches: segments to draw; each takes one stretch of every row.
        settings: speed and memory of the probe.
    """

    lags: int
    batches: int = 1
    settings: ProbeSettings = field(default_factory=ProbeSettings)

    @property
    def steps(self) -> int:
        """Steps of data that one segment needs after the burn-in."""
        return self.lags

    @property
    def losses(self) -> int:
        """Losses of a row in one segment."""
        return 1

    def prepare(self, objective: Objective, segment: Segment, plan: ProbePlan) -> None:
        """Try on some steps of data which path probes take through the model."""
        recurrent = objective.recurrent
        inputs = recurrent.place(segment.inputs)
        with measuring([recurrent.module]), suppress(ValueError):
            # ValueError: the initial state is unknown; the first probe decides after its burn-in.
            plan.layer(recurrent, inputs, detach(recurrent.initial_state(inputs)))

    def measure(self, source: Source) -> LagProfile:
        """Draw segments, probe them and join their profiles."""
        objective, profiles, flags = source.objective, [], []
        with preserve(objective.recurrent.module):
            for batch in range(self.batches):
                segment = source.draw(self.steps)
                count = objective.count_losses(slice_steps(segment.targets, -1, None))
                source.seeded(batch)
                profile = None
                if count > 0:  # else this process has only masked rows; others may have losses
                    profile = probe_segment(
                        objective,
                        segment,
                        burn_in=source.warm_up_steps,
                        train=source.train,
                        settings=self.settings,
                        plan=source.plan,
                    )
                alive = alive_rows(segment, objective.count_losses, profile)
                if source.processes is not None:
                    profile, alive = source.processes.join_profiles(profile, alive, count)
                assert profile is not None
                profiles.append(profile)
                flags.append(alive)
        joined = LagProfile.concatenate(profiles) if len(profiles) > 1 else profiles[0]
        check_reached(joined, np.concatenate(flags))
        return joined


@dataclass(frozen=True)
class LevelRequest:
    """Request the gradient by level of training windows.

    Attributes:
        contexts: 0 = c_0 < c_1 < ... < c_J.
        losses: K2, the steps of a window that carry a loss.
        segments: windows to draw; each takes one stretch of every row.
        groups: independent groups to divide the segments into; None makes one of each segment.
        size: numbers kept per level and group; models with more parameters are sketched.
    """

    contexts: tuple[int, ...]
    losses: int = 1
    segments: int = 8
    groups: int | None = None
    size: int = 2**14

    def __post_init__(self) -> None:
        check_contexts(self.contexts)
        if self.losses < 1 or self.segments < 1:
            raise ValueError(
                f"losses and segments must be at least 1, got {self.losses} and {self.segments}"
            )

    @property
    def lags(self) -> int:
        """The longest context."""
        return self.contexts[-1]

    @property
    def steps(self) -> int:
        """Steps of data that one segment needs after the burn-in."""
        return self.lags + self.losses

    @property
    def batches(self) -> int:
        """Segments to draw."""
        return self.segments

    def within(self, steps: int) -> LevelRequest | None:
        """Return the same with contexts that fit into so many steps; None if hardly any do.

        >>> LevelRequest((0, 1, 2, 4, 8, 16), losses=5).within(12).contexts
        (0, 1, 2, 4)
        """
        fitting = tuple(c for c in self.contexts if c + self.losses <= steps)
        return replace(self, contexts=fitting) if len(fitting) > 2 else None

    def prepare(self, objective: Objective, segment: Segment, plan: ProbePlan) -> None:
        """Do nothing: levels take the same path through every model."""

    def measure(
        self, source: Source, progress: Progress | None = None, before: int = 0
    ) -> LevelSums:
        """Draw windows, backpropagate them level by level and add them up in groups.

        Args:
            source: where windows come from.
            progress: called with the number of windows done and their total.
            before: windows of an earlier measurement that this one continues: numbers in messages
                and seeds of the dropout start there.
        """
        objective, recurrent = source.objective, source.objective.recurrent
        parameters = trained_parameters(objective)
        fold = Fold(parameters, self.size)
        groups = min(self.groups or self.segments, self.segments)
        sums = torch.zeros(groups, len(self.contexts), fold.size)
        counts, reached, unreached = np.zeros(groups), False, dict(parameters)
        with measuring(objective.modules, source.train):
            refuse_batch_norm(recurrent.module)
            for index in range(self.segments):
                segment = source.draw(self.steps, self.losses)
                source.seeded(before + index)
                check_finite(segment.inputs, f"the inputs of segment {before + index}")
                segment = recurrent.place(segment)
                state = warm_up(recurrent, segment, source.warm_up_steps)
                window = segment.between(source.warm_up_steps, segment.steps)
                found = level_gradients(
                    objective, window, state, self.contexts, list(parameters.values())
                )
                reached = reached or found.reached
                group = index % groups
                counts[group] += found.count
                for level, gradient in enumerate(found.gradients):
                    fold.add(gradient, sums[group, level], found.count)
                    for name, g in zip(parameters, gradient, strict=True):
                        if name in unreached and g is not None and bool(g.to_dense().any()):
                            del unreached[name]
                if not torch.isfinite(sums[group]).all():
                    raise ValueError(
                        f"the gradient of segment {before + index} is NaN or infinite: the loss "
                        "or the recurrence overflows there"
                    )
                if progress is not None:
                    progress(index + 1, self.segments)
        vectors = sums.numpy()
        if source.processes is not None:
            vectors = source.processes.total_array(vectors)
            counts = np.array(source.processes.total(counts.tolist()))
            reached = source.processes.total([float(reached)])[0] > 0
        if not reached and self.lags:
            raise ValueError(
                f"{NOT_REACHED}, in any of {self.segments} segments. If the readout starts at "
                "zero, train a few steps first. Or a kernel drops the gradient of the state passed "
                "to it: then every context would look useless"
            )
        names = tuple(name.partition(".")[2] for name in unreached)
        return LevelSums(self.contexts, vectors, counts, self.losses, names)


def trained_parameters(objective: Objective) -> dict[str, torch.Tensor]:
    """Return the parameters that require a gradient, by name; tied parameters appear once."""
    names: dict[torch.Tensor, str] = {}  # a loss may share a parameter with the model
    for index, module in enumerate(objective.modules):
        for name, p in module.named_parameters():
            if p.requires_grad:
                names.setdefault(p, f"{index}.{name}")
    if not names:
        raise ValueError("no parameter of the model requires a gradient")
    return {name: p for p, name in names.items()}


Request = LagRequest | LevelRequest
Evidence = LagProfile | LevelSums
