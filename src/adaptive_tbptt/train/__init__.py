"""Long runs: the trainer, its run folder, checkpoints, progress and logs."""

from ..errors import CheckpointError, TrainingError
from .checkpoint import load as load_checkpoint
from .checkpoint import load_model
from .files import read_rows, read_toml, short_number, write_text
from .loggers import JsonlLogger, Logger, TensorBoardLogger
from .provenance import origin
from .run_folder import RunFolder
from .trainer import FitResult, Trainer

__all__ = [
    "CheckpointError",
    "FitResult",
    "JsonlLogger",
    "Logger",
    "RunFolder",
    "TensorBoardLogger",
    "Trainer",
    "TrainingError",
    "load_checkpoint",
    "load_model",
    "origin",
    "read_rows",
    "read_toml",
    "short_number",
    "write_text",
]
