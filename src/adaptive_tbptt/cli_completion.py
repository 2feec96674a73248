"""What the shell completes: the values of options and arguments. The commands name them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["complete_runs", "one_of"]


def one_of(values: Iterable[str]) -> Callable[[], list[str]]:
    """Return the completion of an option with few values; typer keeps those that fit."""
    known = list(values)
    return lambda: known


def complete_runs(incomplete: str) -> list[str]:
    """Return the run folders up to two levels below what is typed; none leaves files to the shell.

    Two levels reach `runs/copy-k-10`. More would take long in a large folder.
    """
    typed, slash, _ = incomplete.rpartition("/")
    base = Path(typed + slash)
    try:
        found = [
            path.parent for level in ("*", "*/*") for path in base.glob(f"{level}/metrics.jsonl")
        ]
    except OSError:
        return []
    return sorted(os.fspath(folder) for folder in found)
