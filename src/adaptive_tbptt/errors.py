"""What the library raises and warns of, for every room."""

from __future__ import annotations

import difflib
from collections.abc import Collection

__all__ = ["CheckpointError", "TrainingError", "TruncationWarning", "unknown_name"]


class TruncationWarning(UserWarning):
    """The tolerance asked for is not met, or met only by extrapolation."""


class TrainingError(Exception):
    """Training cannot go on; the message says why, at which step, and what is safe."""


class CheckpointError(Exception):
    """A checkpoint that cannot be written, read, or used with this model; the message says why."""


def unknown_name(name: str, known: Collection[str], what: str) -> ValueError:
    """Return an error for a name that is not known; it suggests the nearest known one.

    >>> str(unknown_name("papr", ["paper", "quick"], "preset"))
    "unknown preset 'papr'; did you mean paper? Known: paper, quick"
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.3)
    hint = f"; did you mean {close[0]}?" if close else "."
    return ValueError(f"unknown {what} {name!r}{hint} Known: {', '.join(known)}")
