"""Where a result comes from: the machine, the versions of Python and torch, the commit."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from pathlib import Path

import torch


def origin() -> dict[str, str]:
    """Return the machine, the versions and the commit, by name."""
    return {
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@functools.cache
def commit() -> str:
    """Return the short commit of this code, '+changes' if files differ from it, or 'unknown'."""

    def git(*command: str) -> str:
        folder = str(Path(__file__).parent)
        return subprocess.check_output(
            ["git", "-C", folder, *command], text=True, stderr=subprocess.DEVNULL
        ).strip()

    try:
        # The package may be installed inside the repository of another project, whose commit says
        # nothing about this code: so ask whether this very file is tracked.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        changes = "+changes" if git("status", "--porcelain", ".") else ""
        return git("rev-parse", "--short=12", "HEAD") + changes
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
