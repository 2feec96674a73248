"""TODO."""

from __future__ import annotations


class TruncationWarning(UserWarning):
    """The tolerance asked for is not met, or met only by extrapolation."""


class TrainingError(Exception):
    """Training cannot go on; the message says why, at which step, and what is safe."""


class CheckpointError(Exception):
    """A checkpoint that cannot be written, read, or used with this model; the message says why."""
