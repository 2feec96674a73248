"""Copy sequences in the two layouts that are in circulation, any length, seeded, vectorised.

Symbols: 0 is blank, 1 the marker, 2 and up are data.

    paper      m data symbols, the marker ('start recall'), m-1 blanks
               m blanks, then the m data symbols
    released   the marker, m-1 data symbols, m blanks
               m blanks, then the marker and the data symbols

The text of the paper describes the first; the published numbers come from the second, with four
data symbols.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray

from adaptive_tbptt import SequenceStream

Layout = Literal["paper", "released"]


Symbols = NDArray[np.uint8]


BLANK, MARKER, FIRST_DATA = 0, 1, 2


class CopySymbols(NamedTuple):
    """Inputs and targets, `(steps, rows)`."""

    inputs: Symbols
    targets: Symbols


def copy_symbols(
    steps: int,
    rows: int,
    memory: tuple[int, int] = (10, 10),
    *,
    layout: Layout = "released",
    data_symbols: int = 4,
    seed: int = 0,
) -> CopySymbols:
    """Generate rows of concatenated copy sequences; every row begins at a random place in one.

    Args:
        steps: length of each row.
        rows: number of rows.
        memory: m is drawn uniformly from this range, ends included, for every sequence.
        layout: 'paper' or 'released'.
        data_symbols: number of data symbols (I in the paper).
        seed: the same seed gives the same symbols; rows do not depend on their number.

    >>> copy_symbols(5, 2, (3, 3)).inputs.shape
    (5, 2)
    """
    low, high = memory
    if not 1 <= low <= high:
        raise ValueError(f"m must be at least 1 and its range in order, got {low} to {high}")
    if layout not in ("paper", "released"):
        raise ValueError(f"layout must be 'paper' or 'released', got {layout!r}")
    if steps < 1 or rows < 1:
        raise ValueError(f"steps and rows must be at least 1, got {steps} and {rows}")
    if not 1 <= data_symbols <= 254:
        raise ValueError(f"data_symbols must be in [1, 254], got {data_symbols}")
    inputs, targets = (np.empty((rows, steps), dtype=np.uint8) for _ in range(2))
    for row, child in enumerate(np.random.SeedSequence(seed).spawn(rows)):
        rng = np.random.default_rng(child)
        m = rng.integers(low, high + 1, steps // (2 * low) + 2)
        offset = int(rng.integers(2 * m[0]))
        total = offset + steps
        m = m[: int(np.searchsorted(np.cumsum(2 * m), total)) + 1]
        data = rng.integers(FIRST_DATA, FIRST_DATA + data_symbols, int(m.sum()), dtype=np.uint8)
        x, y = lay_out(m, data, layout)
        inputs[row], targets[row] = x[offset:total], y[offset:total]
    return CopySymbols(np.ascontiguousarray(inputs.T), np.ascontiguousarray(targets.T))


def lay_out(m: NDArray[np.int64], data: Symbols, layout: Layout) -> CopySymbols:
    """Lay out sequences of lengths `m`, whose symbols stand one after the other in `data`.

    The paper's example, with A, B, C = 2, 3, 4:

    >>> x, y = lay_out(np.array([6]), np.array([2, 4, 3, 3, 2, 3], dtype=np.uint8), "paper")
    >>> "".join("-#ABC"[i] for i in x), "".join("-#ABC"[i] for i in y)
    ('ACBBAB#-----', '------ACBBAB')
    """
    said = np.zeros(2 * int(m.sum()), dtype=np.uint8)
    heard = np.zeros_like(said)
    starts = np.cumsum(2 * m) - 2 * m
    # Where the first half of each sequence goes; its second half is m further on.
    place = np.arange(len(data)) + np.repeat(starts - (np.cumsum(m) - m), m)
    later = place + np.repeat(m, m)
    if layout == "released":
        data = data.copy()
        data[np.cumsum(m) - m] = MARKER
    said[place] = data
    heard[later] = data
    if layout == "paper":
        said[starts + m] = MARKER
    return CopySymbols(said, heard)


def copy_stream(symbols: CopySymbols) -> SequenceStream:
    """Wrap symbols as a stream; they stay bytes, the model and the loss widen them."""
    return SequenceStream(torch.from_numpy(symbols.inputs), torch.from_numpy(symbols.targets))


def read_arrays(path: Path) -> dict[str, CopySymbols]:
    """Read the arrays that were released with the paper: `{train,valid,test}_{inputs,targets}`."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = {
                split: CopySymbols(arrays[f"{split}_inputs"], arrays[f"{split}_targets"])
                for split in ("train", "valid", "test")
            }
        if any(int(part.min()) < 0 for split in found.values() for part in split):
            raise ValueError("a symbol is negative")
        return found
    except (OSError, KeyError, ValueError, BadZipFile) as error:
        raise ValueError(
            f"cannot read copy arrays from {path}: {error}. Expected an .npz file with "
            "{train,valid,test}_{inputs,targets}, each (time, rows)"
        ) from error
