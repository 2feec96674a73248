"""From a model and data to a lag profile."""

from .lag_probe import probe

__all__ = [
    "probe",
]
