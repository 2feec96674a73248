"""One call each: diagnose a model, check a promised bias."""

from .bias_check import BiasCheck, check_bias
from .diagnosis_result import Diagnosis, Row
from .model_diagnosis import diagnose
from .sampling import Sampling
from .window_memory import WindowMemory

__all__ = [
    "BiasCheck",
    "Diagnosis",
    "Row",
    "Sampling",
    "WindowMemory",
    "check_bias",
    "diagnose",
]
