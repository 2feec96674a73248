"""Several processes that train together: rows dealt out, one gradient, one K."""

from .ranks import Alone, Distributed, Ranks, present_ranks, process_group

__all__ = [
    "Alone",
    "Distributed",
    "Ranks",
    "present_ranks",
    "process_group",
]
