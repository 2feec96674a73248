"""The training loop: windows of a stream, their gradients, carried states, step sizes."""

from .adaptive import AdaptiveTBPTT
from .clipping import Clip
from .estimates import Estimate
from .evaluation import evaluate
from .step_scale import StepScale
from .window import Window

__all__ = [
    "AdaptiveTBPTT",
    "Clip",
    "Estimate",
    "StepScale",
    "Window",
    "evaluate",
]
