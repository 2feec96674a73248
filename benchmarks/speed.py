"""Time contenders side by side in one process; read the ratios, and only on a quiet machine.

python benchmarks/speed.py --size copy --size ptb-small
python benchmarks/speed.py --size copy --only probe --turns 10
python benchmarks/speed.py --size copy --sweeps --out benchmarks/results/speed
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from adaptive_tbptt._torch.number_formats import flushed_denormals
from adaptive_tbptt.errors import unknown_name
from contenders import BENCHMARKS, SIZES
from sweeps import SWEEPS, plot_sweeps
from timing_tables import as_markdown, machine, read_csv, update_csv


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--size", action="append", help=f"{', '.join(SIZES)}; may be repeated (copy and ptb-small)"
    )
    parser.add_argument(
        "--only", action="append", help=f"{', '.join(BENCHMARKS)}; may be repeated (all)"
    )
    parser.add_argument(
        "--sweeps",
        action="store_true",
        help="also the cost against R, K, T and hidden size, as a picture",
    )
    parser.add_argument("--turns", type=int, default=5, help="turns each contender takes")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument(
        "--out", type=Path, help="folder for tables and picture; other sizes in it are kept"
    )
    parser.add_argument(
        "--redraw", action="store_true", help="only draw the picture of the sweeps in --out again"
    )
    given = parser.parse_args()
    if given.redraw and given.out is None:
        parser.error("--redraw needs --out, the folder that holds sweeps.csv")
    given.size, given.only = given.size or ["copy", "ptb-small"], given.only or list(BENCHMARKS)
    if given.turns < 1:
        parser.error(f"turns must be at least 1, got {given.turns}")
    for names, known, what in (
        (given.size, SIZES, "size"),
        (given.only, BENCHMARKS, "benchmark"),
    ):
        for name in names:
            if name not in known:
                parser.error(str(unknown_name(name, known, what)))
    return given


def main() -> None:
    given = options()
    if given.redraw:
        plot_sweeps(read_csv(given.out / "sweeps.csv"), given.out / "sweeps.png")
        return
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    timings, points = [], []
    with flushed_denormals():  # for all contenders alike
        for name in given.size:
            for kind in given.only:
                print(f"{kind}, {name}", file=sys.stderr, flush=True)
                timings += BENCHMARKS[kind](SIZES[name], given.turns)
        for name, sweep in SWEEPS.items() if given.sweeps else ():
            print(f"sweep of {name}", file=sys.stderr, flush=True)
            points += sweep(given.turns, "smoke" in given.size)
    print(as_markdown(timings))
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        everything = update_csv(timings, given.out / "bench.csv")
        (given.out / "bench.md").write_text(f"{as_markdown(everything)}\n\n{machine()}\n")
        if given.sweeps:
            plot_sweeps(update_csv(points, given.out / "sweeps.csv"), given.out / "sweeps.png")


if __name__ == "__main__":
    main()
