"""One call each: diagnose a model, check a promised bias."""

from .bias_check import BiasCheck, check_bias
from .model_diagnosis import Diagnosis, Row, diagnose
from .sampling import Sampling

__all__ = [
    "BiasCheck",
    "Diagnosis",
    "Row",
    "Sampling",
    "check_bias",
    "diagnose",
]
