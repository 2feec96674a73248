"""Marked event sequences: the Book Order files, and synthetic ones with a known intensity.

The format is that of Du et al. (2016): a pair of text files, a line per sequence, event types
(1, 2, ...) in one and times in the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from adaptive_tbptt import SequenceStream


class Sequence(NamedTuple):
    """Events of one sequence: types from 0 on, and times that do not decrease."""

    types: NDArray[np.int64]
    times: NDArray[np.float64]


def read_sequences(folder: Path, split: str, number: int = 1) -> list[Sequence]:
    """Read `event-N-SPLIT.txt` and `time-N-SPLIT.txt`; a line that is wrong is named."""
    events, times = (folder / f"{kind}-{number}-{split}.txt" for kind in ("event", "time"))
    missing = [path.name for path in (events, times) if not path.is_file()]
    if missing:
        raise ValueError(
            f"{folder} has no {', '.join(missing)}: pairs event-{number}-train.txt and "
            f"time-{number}-train.txt, and the same for test, are expected, a line per sequence. "
            "Book Order comes with the code of Du et al. (KDD 2016)"
        )
    lines = events.read_text().splitlines(), times.read_text().splitlines()
    if len(lines[0]) != len(lines[1]):
        raise ValueError(
            f"{events.name} has {len(lines[0])} lines, {times.name} has {len(lines[1])}"
        )
    return [
        _parse(e, t, f"line {i} of {events.name} and {times.name}")
        for i, (e, t) in enumerate(zip(*lines, strict=True), start=1)
    ]


def _parse(events: str, times: str, where: str) -> Sequence:
    try:
        types = np.array(events.split(), dtype=np.int64) - 1
        moments = np.array(times.split(), dtype=np.float64)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if len(types) != len(moments):
        raise ValueError(f"{where}: {len(types)} events but {len(moments)} times")
    if len(types) < 2:
        raise ValueError(f"{where}: a sequence needs at least two events, has {len(types)}")
    if types.min() < 0:
        raise ValueError(f"{where}: event types count from 1, found {types.min() + 1}")
    if not np.isfinite(moments).all() or (np.diff(moments) < 0).any():
        raise ValueError(f"{where}: times must be finite and must not decrease")
    return Sequence(types, moments)


def point_stream(
    sequences: list[Sequence], rows: int, *, scale: float = 1.0, resets: bool = True
) -> SequenceStream:
    """Lay sequences one after the other and cut them into rows; each event predicts the next.

    Inputs are the type of event i, whether it is the first of its sequence, and the gap before it;
    targets are type and gap of event i+1. The last event of a sequence predicts nothing.

    Args:
        sequences: at least two events each.
        rows: number of rows; what is left over at the end is not used.
        scale: unit of time; gaps are multiplied by it.
        resets: return the state to its start where a sequence begins. The release does not.
    """
    gaps = [np.diff(s.times) * scale for s in sequences]
    before = np.concatenate([np.concatenate([[0.0], g[:-1]]) for g in gaps])
    after = np.concatenate(gaps)
    starts = np.zeros(len(after), dtype=bool)
    starts[np.cumsum([0, *(len(g) for g in gaps[:-1])])] = True
    steps = len(after) // rows
    if steps < 1:
        raise ValueError(f"{len(after)} events are too few for {rows} rows")

    def cut(values: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values[: steps * rows].reshape(rows, steps))

    types = np.concatenate([s.types[:-1] for s in sequences])
    following = np.concatenate([s.types[1:] for s in sequences])
    inputs = {
        "type": cut(types),
        "first": cut(starts.astype(np.float32)),
        "gap": cut(before.astype(np.float32)),
    }
    targets = {"type": cut(following), "gap": cut(after.astype(np.float32))}
    cuts = cut(starts) if resets else None
    return SequenceStream(inputs, targets, cuts, batch_first=True)


def poisson_sequences(
    rate: float, events: int, count: int, *, shares: tuple[float, ...] = (0.5, 0.5), seed: int = 0
) -> list[Sequence]:
    """Sequences of a Poisson process with independent types: the intensity is `rate` throughout."""
    rng = np.random.default_rng(seed)
    return [
        Sequence(
            rng.choice(len(shares), events, p=shares),
            np.cumsum(rng.exponential(1.0 / rate, events)),
        )
        for _ in range(count)
    ]


def hawkes_sequences(
    base: float, jump: float, decay: float, events: int, count: int, *, seed: int = 0
) -> list[Sequence]:
    """Sequences of a Hawkes process: lambda(t) = base + jump * sum_i exp(-decay (t - t_i)).

    By Ogata's thinning. It is stationary for jump < decay, with mean intensity
    base / (1 - jump / decay). All events are of one type.
    """
    if not 0.0 <= jump < decay or base <= 0.0:
        raise ValueError(f"expected base > 0 and 0 <= jump < decay, got {base}, {jump}, {decay}")
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        times: list[float] = []
        now, excited = 0.0, 0.0
        while len(times) < events:
            bound = base + excited
            wait = rng.exponential(1.0 / bound)
            now += wait
            excited *= np.exp(-decay * wait)
            if rng.uniform() * bound <= base + excited:
                times.append(now)
                excited += jump
        sequences.append(Sequence(np.zeros(events, dtype=np.int64), np.array(times)))
    return sequences
