"""One interface for every recurrent module, its losses, and advisory checks of both."""

from .recurrent import LossFn, Recurrent, as_recurrent

__all__ = [
    "LossFn",
    "Recurrent",
    "as_recurrent",
]
