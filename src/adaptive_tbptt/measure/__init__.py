"""From a model and data to measurements: lag profiles, and gradients by level."""

from .._torch.preserve_model import measuring
from .lag_probe import ProbeSettings, probe
from .levels import LevelGradients, level_gradients
from .sampling import Evidence, LagRequest, LevelRequest, Request, Source

__all__ = [
    "Evidence",
    "LagRequest",
    "LevelGradients",
    "LevelRequest",
    "ProbeSettings",
    "Request",
    "Source",
    "level_gradients",
    "measuring",
    "probe",
]
