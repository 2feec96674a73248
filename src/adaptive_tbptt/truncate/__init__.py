"""How far back: controllers that turn a profile into K, and the gauges they read it with."""

from .bias_tolerance import BiasTolerance
from .controller import Controller, TruncationState
from .fixed import FixedTruncation
from .gauges import Gauge, PaperGauge, ReleaseGauge
from .parameter_gauges import MeasuredGauge, ParameterGauge
from .probe_budget import ProbeBudget
from .smoothed import Smoothed
from .wrappers import Bucketed, Limited, RateLimited

__all__ = [
    "BiasTolerance",
    "Bucketed",
    "Controller",
    "FixedTruncation",
    "Gauge",
    "Limited",
    "MeasuredGauge",
    "PaperGauge",
    "ParameterGauge",
    "ProbeBudget",
    "RateLimited",
    "ReleaseGauge",
    "Smoothed",
    "TruncationState",
]
