"""What a check of a model or a loss found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """An assumption of the library that does not hold.

    Attributes:
        message: what was found and what to do.
        fatal: whether training would be wrong; a loop then refuses to start.
    """

    message: str
    fatal: bool = False

    def __str__(self) -> str:
        return self.message
