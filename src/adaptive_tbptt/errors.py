"""Errors and warnings of the library. Every message says what happened and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from numbers import Integral

__all__ = [
    "CheckpointError",
    "DamagedFileError",
    "TrainingError",
    "TruncationWarning",
    "require_whole",
    "unknown_name",
]


class TruncationWarning(UserWarning):
    """K does not meet the tolerance you asked for, or meets it only by extrapolation."""


class TrainingError(Exception):
    """Training had to stop. The message says why, where, and which checkpoint is still good."""


class CheckpointError(Exception):
    """A checkpoint could not be written, read or loaded into this model. The message says why."""


class DamagedFileError(ValueError):
    """A file is not what a run writes. The message names it and says what is wrong."""


def unknown_name(name: str, known: Collection[str], what: str) -> ValueError:
    """Return an error for a name that is not known; it suggests the nearest known one.

    >>> str(unknown_name("papr", ["paper", "quick"], "preset"))
    "unknown preset 'papr'; did you mean paper? Known: paper, quick"
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.3)
    hint = f"; did you mean {close[0]}?" if close else "."
    return ValueError(f"unknown {what} {name!r}{hint} Known: {', '.join(known)}")


def require_whole(**values: object) -> None:
    """Refuse a number of steps that is no whole number; None stands for one not given.

    >>> require_whole(k=2.5)
    Traceback (most recent call last):
    TypeError: k must be a whole number of steps, got 2.5
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral | None):
            raise TypeError(f"{name} must be a whole number of steps, got {value!r}")
