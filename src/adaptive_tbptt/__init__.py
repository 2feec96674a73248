"""Truncated backpropagation through time that chooses its own truncation length."""

from . import data, diagnosis, distributed, estimate, loop, measure, model, train, truncate
from ._version import __version__ as __version__
from .data import ChunkStream, SequenceStream
from .diagnosis import check_bias, diagnose, lookback
from .errors import TruncationWarning
from .estimate import bias_bound, choose_truncation, fit_decay
from .loop import AdaptiveTBPTT, StepScale, evaluate
from .measure import probe
from .model import check
from .train import Trainer
from .truncate import BiasTolerance, FixedTruncation, Unbiased

__all__ = [
    "AdaptiveTBPTT",
    "BiasTolerance",
    "ChunkStream",
    "FixedTruncation",
    "SequenceStream",
    "StepScale",
    "Trainer",
    "TruncationWarning",
    "Unbiased",
    "bias_bound",
    "check",
    "check_bias",
    "choose_truncation",
    "data",
    "diagnose",
    "diagnosis",
    "distributed",
    "estimate",
    "evaluate",
    "fit_decay",
    "lookback",
    "loop",
    "measure",
    "model",
    "probe",
    "train",
    "truncate",
]
