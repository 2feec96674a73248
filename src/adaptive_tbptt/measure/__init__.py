"""From a model and data to a lag profile."""

from .lag_probe import probe, probe_segment
from .sampling import draw_segment

__all__ = [
    "draw_segment",
    "probe",
    "probe_segment",
]
