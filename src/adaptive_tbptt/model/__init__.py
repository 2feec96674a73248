"""One interface for every recurrent module, its losses, and advisory checks of both."""

from .checks import check
from .finding import Finding
from .objective import CountLosses, Objective
from .recurrent import LossFn, Recurrent, as_recurrent
from .running import advance

__all__ = [
    "CountLosses",
    "Finding",
    "LossFn",
    "Objective",
    "Recurrent",
    "advance",
    "as_recurrent",
    "check",
]
