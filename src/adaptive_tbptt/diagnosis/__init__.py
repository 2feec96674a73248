"""One call each: diagnose a model, check a promised bias, classify its stability."""

from .bias_check import BiasCheck, check_bias
from .decay_diagnosis import DecayDiagnosis, diagnose_decay
from .model_diagnosis import Diagnosis, Row, diagnose
from .sampling import Sampling
from .stability_verdict import Stability, stability

__all__ = [
    "BiasCheck",
    "DecayDiagnosis",
    "Diagnosis",
    "Row",
    "Sampling",
    "Stability",
    "check_bias",
    "diagnose",
    "diagnose_decay",
    "stability",
]
