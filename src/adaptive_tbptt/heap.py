"""Keep freed memory at hand on a CPU, instead of returning it to the system and asking again.

glibc returns large blocks to the system when they are freed. The logits of a window over a large
vocabulary are such blocks: every window asks for them anew, and touching each page for the first
time costs more than the softmax does. Kept, training at the size of the small WikiText-2 preset is
1.1 to 1.3 (K = 10), 1.4 (K = 50 and 100) and 1.5 to 1.7 times (K = 300) as fast, at that of Penn
Treebank 1.3 (K = 10) and 1.1 times (K = 100): processor time of one thread, medians over windows.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_NEVER = 2**31 - 1  # the largest int: 2 GiB


def keep_freed_memory() -> bool:
    """Let blocks below 2 GiB stay with the process; return whether its malloc could be told.

    It holds for the whole process, so it is for programs, not for libraries. Memory is used again
    and does not grow without end, but what was needed at most is not given back: the small
    WikiText-2 preset takes 1.5 GB instead of 1.2 at K = 300. `atbptt` does it by itself.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # none in musl
    return mallopt is not None and all(
        mallopt(threshold, _NEVER) for threshold in (_MMAP_THRESHOLD, _TRIM_THRESHOLD)
    )
