"""Count the files a reader passes from the first window of a loop to its K and on to `backward`.

The trace is that of an LSTM with the paper's gauge: every call of a function of the library, in
order. A change of file is counted where two calls in a row lie in different files.

    python tools/trace_reading.py          # the two counts
    python tools/trace_reading.py --list   # and the calls by file
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import adaptive_tbptt as at

PACKAGE = Path(at.__file__).parent


def calls() -> list[str]:
    """Return the file of every call, relative to the package."""
    torch.manual_seed(0)
    stream = at.SequenceStream(torch.randn(400, 4, 3), torch.randn(400, 4, 8))
    tolerance = at.BiasTolerance(delta=0.1, gauge=at.truncate.PaperGauge())
    windows = iter(at.AdaptiveTBPTT(nn.LSTM(3, 8), nn.MSELoss(), tolerance).windows(stream))
    seen: list[str] = []

    def note(frame: Any, event: str, arg: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(PACKAGE)):
            seen.append(str(Path(path).relative_to(PACKAGE)))

    sys.setprofile(note)
    try:
        next(windows).backward()
    finally:
        sys.setprofile(None)
    return seen


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="list the calls by file")
    options = parser.parse_args()
    seen = calls()
    changes = sum(a != b for a, b in pairwise(seen))
    print(f"{len(set(seen))} files, {changes} changes of file, {len(seen)} calls")
    if options.list:
        for name, count in Counter(seen).most_common():
            print(f"{count:5d}  {name}")


if __name__ == "__main__":
    main()
