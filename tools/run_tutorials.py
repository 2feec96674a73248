"""Run every tutorial and keep what its page shows: figures in docs/img, output beside the script.

`python tools/run_tutorials.py [NAME ...]`
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def main() -> None:
    """Run those named, or all."""
    scripts = sorted((DOCS / "tutorials").glob("*.py"))
    for script in scripts:
        if len(sys.argv) == 1 or script.stem in sys.argv[1:]:
            print(script.stem, flush=True)
            command = [sys.executable, str(script), str(DOCS / "img")]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            script.with_suffix(".txt").write_text(done.stdout)


if __name__ == "__main__":
    main()
