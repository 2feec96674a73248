"""Run the code of pages and write what each block prints into the text block right below it.

`python tools/fill_outputs.py PAGE [PAGE ...]`. A block without one runs too; its
output is not kept. `tests/test_docs.py` compares what is shown with what comes out.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def fill(text: str) -> str:
    """Return the page with every output as it comes out now."""
    names: dict[str, object] = {"__name__": "page"}
    parts, last, printed, end = [], 0, None, 0
    for block in FENCE.finditer(text):
        kind, body = block[1], block[2]
        parts.append(text[last : block.start()])
        last = block.end()
        if kind in ("python", "diff"):
            if kind == "diff":
                kept = [line for line in body.splitlines() if line[:1] != "-"]
                body = "\n".join(line[1:] for line in kept)
            found = io.StringIO()
            with warnings.catch_warnings(), contextlib.redirect_stdout(found):
                warnings.simplefilter("ignore")
                exec(compile(body, "page", "exec"), names)
            printed, end = found.getvalue(), block.end()
            parts.append(block[0])
        elif kind == "text" and printed is not None and not text[end : block.start()].strip():
            parts.append(f"```text\n{printed.rstrip()}\n```")
            printed = None
        else:
            parts.append(block[0])
    return "".join([*parts, text[last:]])


def main() -> None:
    """Fill the pages that are named."""
    for page in map(Path, [str(Path(name).resolve()) for name in sys.argv[1:]]):
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            page.write_text(fill(page.read_text()))
            os.chdir("/")
        print(page.name, flush=True)


if __name__ == "__main__":
    main()
