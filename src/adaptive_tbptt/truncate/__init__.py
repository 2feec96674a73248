"""How far back: controllers that turn a profile into K, and the gauges they read it with."""

from .bias_tolerance import BiasTolerance
from .controller import Control, Controller
from .fixed import FixedTruncation
from .gauges import Gauge, PaperGauge, ReleaseGauge
from .parameter_gauges import MeasuredGauge, ParameterGauge
from .probe_budget import Probes
from .smoothed import Smoothed
from .wrappers import Bucketed, Limited, RateLimited

__all__ = [
    "BiasTolerance",
    "Bucketed",
    "Control",
    "Controller",
    "FixedTruncation",
    "Gauge",
    "Limited",
    "MeasuredGauge",
    "PaperGauge",
    "ParameterGauge",
    "Probes",
    "RateLimited",
    "ReleaseGauge",
    "Smoothed",
]
