"""Truncated backpropagation through time that chooses its own truncation length."""

from .bias import BiasCurve, bias_bound
from .check_bias import BiasCheck, check_bias
from .chunks import ChunkStream
from .clip import Clip
from .contributions import Contributions
from .control import BiasTolerance, Control, Controller, FixedTruncation
from .decay import DecayFit, fit_decay
from .diagnose import Diagnosis, diagnose
from .evaluate import evaluate
from .gauge import Gauge, MeasuredGauge, PaperGauge, ParameterGauge, Probes, ReleaseGauge
from .measured_bias import MeasuredCurve, measured_bias
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
    "BiasCheck",
    "BiasCurve",
    "BiasTolerance",
    "Bucketed",
    "ChunkStream",
    "Clip",
    "Contributions",
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
    "MeasuredCurve",
    "MeasuredGauge",
    "Outcome",
    "PaperGauge",
    "ParameterGauge",
    "Probes",
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
    "check_bias",
    "choose_truncation",
    "diagnose",
    "evaluate",
    "fit_decay",
    "measured_bias",
    "present_ranks",
    "probe",
    "process_group",
    "stability",
]
