"""From measurements to a truncation length, on arrays alone: nothing here imports torch."""

from .bias import BiasCurve, bias_bound
from .decay import DecayFit, fit_decay
from .lag_profile import LagProfile
from .level_bias import LevelCurve
from .level_sums import LevelSums, levels_up_to
from .truncation import Curve, Limits, Outcome, TruncationDecision, choose_truncation

__all__ = [
    "BiasCurve",
    "Curve",
    "DecayFit",
    "LagProfile",
    "LevelCurve",
    "LevelSums",
    "Limits",
    "Outcome",
    "TruncationDecision",
    "bias_bound",
    "choose_truncation",
    "fit_decay",
    "levels_up_to",
]
