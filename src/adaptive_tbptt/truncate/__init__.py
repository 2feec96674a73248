"""How far back: controllers turn measurements into K, and read them with gauges."""

from .best_guess import BestGuess
from .bias_tolerance import BiasTolerance
from .controller import Context, Controller, TruncationState
from .fixed import FixedTruncation
from .gauges import Gauge, MeasuredGauge, PaperGauge, ProbeBudget, ReleaseGauge, StateGauge
from .unbiased import Unbiased
from .wrappers import Bucketed, Limited, RateLimited

__all__ = [
    "BestGuess",
    "BiasTolerance",
    "Bucketed",
    "Context",
    "Controller",
    "FixedTruncation",
    "Gauge",
    "Limited",
    "MeasuredGauge",
    "PaperGauge",
    "ProbeBudget",
    "RateLimited",
    "ReleaseGauge",
    "StateGauge",
    "TruncationState",
    "Unbiased",
]
