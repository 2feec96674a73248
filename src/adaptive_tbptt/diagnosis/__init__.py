"""One call each: diagnose a model, check a promised bias, classify its stability."""

from .bias_check import BiasCheck, check_bias
from .model_diagnosis import Diagnosis, diagnose
from .stability_verdict import Stability, stability

__all__ = [
    "BiasCheck",
    "Diagnosis",
    "Stability",
    "check_bias",
    "diagnose",
    "stability",
]
