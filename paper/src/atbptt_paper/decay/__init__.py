"""The paper's diagnosis: norms of the state's gradient, the K that their bound asks for, stability.

It judges a model by a bound. `adaptive_tbptt.diagnose` measures the bias itself.
"""

from . import theory
from .decay_diagnosis import DecayDiagnosis, diagnose_decay
from .resampling import Uncertainty, bootstrap
from .stability_verdict import Stability, stability

__all__ = [
    "DecayDiagnosis",
    "Stability",
    "Uncertainty",
    "bootstrap",
    "diagnose_decay",
    "stability",
    "theory",
]
