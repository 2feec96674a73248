"""Errors and warnings of the library. Every message says what happened and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Collection

__all__ = [
    "CheckpointError",
    "DamagedFileError",
    "TrainingError",
    "TruncationWarning",
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
