"""Freed memory is kept: once the heap has its size, large blocks cost no page faults."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, statistics, sys, torch
from adaptive_tbptt.heap import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()
rounds = []
for _ in range(9):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(25_000_000) for _ in range(2)]  # 100 MB each
    del blocks
    rounds.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
# The median: in early rounds a small block may settle between the two and the heap grows once more.
print(int(statistics.median(rounds)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="speaks to glibc")
def test_a_block_that_was_freed_is_used_again():
    def faults(how):
        command = [sys.executable, "-c", FAULTS, how]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    # Without, every page of 4 KiB, or of 2 MiB where the system hands out large ones.
    assert faults("kept") < 20 < faults("plain")
