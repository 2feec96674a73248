"""Truncated backpropagation through time that chooses its own truncation length."""

from .bias import BiasCurve, bias_bound
from .chunks import ChunkStream
from .clip import Clip
from .control import BiasTolerance, Control, Controller, FixedTruncation
from .decay import DecayFit, fit_decay
from .diagnose import Diagnosis, diagnose
from .evaluate import evaluate
from .gauge import Gauge, PaperGauge, ReleaseGauge
from .model import Recurrent, as_recurrent
from .probe import probe
from .profile import LagProfile
from .ranks import Distributed, Ranks, present_ranks, process_group
from .run_folder import TrainingError
from .stability import Stability, stability
from .step_scale import StepScale
from .stream import Segment, SequenceStream, Stream
from .trainer import FitResult, Trainer
from .truncation import Outcome, TruncationDecision, choose_truncation
from .uncertainty import Uncertainty, bootstrap
from .window import Window
from .windows import AdaptiveTBPTT, Estimate, TruncationWarning
from .wrappers import Bucketed, Limited, RateLimited, Smoothed

__all__ = [
    "AdaptiveTBPTT",
    "BiasCurve",
    "BiasTolerance",
    "Bucketed",
    "ChunkStream",
    "Clip",
    "Control",
    "Controller",
    "DecayFit",
    "Diagnosis",
    "Distributed",
    "Estimate",
    "FitResult",
    "FixedTruncation",
    "Gauge",
    "LagProfile",
    "Limited",
    "Outcome",
    "PaperGauge",
    "Ranks",
    "RateLimited",
    "Recurrent",
    "ReleaseGauge",
    "Segment",
    "SequenceStream",
    "Smoothed",
    "Stability",
    "StepScale",
    "Stream",
    "Trainer",
    "TrainingError",
    "TruncationDecision",
    "TruncationWarning",
    "Uncertainty",
    "Window",
    "as_recurrent",
    "bias_bound",
    "bootstrap",
    "choose_truncation",
    "diagnose",
    "evaluate",
    "fit_decay",
    "present_ranks",
    "probe",
    "process_group",
    "stability",
]
