"""One call each: diagnose a model, ask how much history it needs, check a promised bias."""

from .bias_check import BiasCheck, check_bias
from .diagnosis_result import Diagnosis, Row
from .lookback_result import History, Lookback
from .model_diagnosis import diagnose
from .prediction_history import lookback
from .sampling import Sampling
from .window_memory import WindowMemory

__all__ = [
    "BiasCheck",
    "Diagnosis",
    "History",
    "Lookback",
    "Row",
    "Sampling",
    "WindowMemory",
    "check_bias",
    "diagnose",
    "lookback",
]
