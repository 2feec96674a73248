"""How many threads a command should use.

On two idle cores a second thread made windows 1.3 to 1.9 times as fast, whatever the size of the
LSTM (50 to 900 units). Beside six busy processes an epoch of the copy task took 41 s with one
thread, and had not ended after 150 s with two: threads wait for each other at every operation.
"""

from __future__ import annotations

import os

import torch


def use_idle_cores() -> str | None:
    """Use as many threads as there are idle cores; return a sentence if that is fewer than usual.

    Does nothing if `OMP_NUM_THREADS` is set, or if the system does not report its load.
    """
    usual = torch.get_num_threads()
    try:
        busy = round(os.getloadavg()[0])
    except (AttributeError, OSError):
        return None
    if "OMP_NUM_THREADS" in os.environ or usual == 1:
        return None
    threads = max(1, min(usual, (os.cpu_count() or usual) - busy))
    if threads == usual:
        return None
    torch.set_num_threads(threads)
    return (
        f"using {threads} of {usual} threads, since {busy} processes are running already; "
        "OMP_NUM_THREADS sets another number"
    )
