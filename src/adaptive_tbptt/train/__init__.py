"""Long runs: the trainer, its run folder, checkpoints, progress and logs."""

from ..errors import TrainingError
from .trainer import FitResult, Trainer

__all__ = [
    "FitResult",
    "Trainer",
    "TrainingError",
]
