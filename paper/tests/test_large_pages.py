"""Large blocks come in large pages on the command line: no tensor is made before torch is told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
FAULTS = """
import importlib, resource, sys, torch

cli = importlib.import_module(sys.argv[1])
if sys.argv[2] == "told":
    cli.main()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
blocks = [torch.ones(25_000_000) for _ in range(2)]  # 100 MB each
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(
    not MODE.is_file() or "[madvise]" not in MODE.read_text(),
    reason="the system hands out large pages never, or always",
)
@pytest.mark.parametrize("module", ["adaptive_tbptt.cli", "atbptt_paper.cli"])
def test_large_blocks_cost_few_page_faults(module):
    untold = {n: v for n, v in os.environ.items() if n != "THP_MEM_ALLOC_ENABLE"}

    def faults(how):
        command = [sys.executable, "-c", FAULTS, module, how]
        return int(subprocess.check_output(command, text=True, env=untold))

    # Half: memory in use may leave the system too few large pages for all of it.
    assert faults("told") < faults("plain") / 2
