"""One interface for every recurrent module, its losses, and advisory checks of both."""

from .checks import Finding, check
from .objective import CountLosses, Objective
from .recurrent import LossFn, Recurrent, as_recurrent

__all__ = [
    "CountLosses",
    "Finding",
    "LossFn",
    "Objective",
    "Recurrent",
    "as_recurrent",
    "check",
]
