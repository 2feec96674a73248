"""From measured norms to a truncation length, on arrays alone: nothing here imports torch."""

from .bias import BiasCurve, bias_bound
from .contributions import Contributions
from .decay import DecayFit, fit_decay
from .lag_profile import LagProfile
from .measured_curve import MeasuredCurve, measured_bias
from .resampling import Uncertainty, bootstrap
from .truncation import Outcome, TruncationDecision, choose_truncation

__all__ = [
    "BiasCurve",
    "Contributions",
    "DecayFit",
    "LagProfile",
    "MeasuredCurve",
    "Outcome",
    "TruncationDecision",
    "Uncertainty",
    "bias_bound",
    "bootstrap",
    "choose_truncation",
    "fit_decay",
    "measured_bias",
]
