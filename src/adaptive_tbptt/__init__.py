"""Truncated backpropagation through time that chooses its own truncation length."""

from .bias import BiasCurve, bias_bound
from .decay import DecayFit, fit_decay
from .diagnose import Diagnosis, diagnose
from .gauge import Gauge, PaperGauge, ReleaseGauge
from .model import Recurrent, as_recurrent
from .probe import probe
from .profile import LagProfile
from .stability import Stability, stability
from .stream import Segment, SequenceStream
from .truncation import Outcome, TruncationDecision, choose_truncation
from .uncertainty import Uncertainty, bootstrap

__all__ = [
    "BiasCurve",
    "DecayFit",
    "Diagnosis",
    "Gauge",
    "LagProfile",
    "Outcome",
    "PaperGauge",
    "Recurrent",
    "ReleaseGauge",
    "Segment",
    "SequenceStream",
    "Stability",
    "TruncationDecision",
    "Uncertainty",
    "as_recurrent",
    "bias_bound",
    "bootstrap",
    "choose_truncation",
    "diagnose",
    "fit_decay",
    "probe",
    "stability",
]
