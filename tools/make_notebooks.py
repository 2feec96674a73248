"""Turn the tutorials into notebooks: `python tools/make_notebooks.py`.

A notebook is its script cell by cell, without the checks at the end and without outputs. Figures go
to the folder `figures` beside it. Links into the documentation become plain text, since a notebook
is read elsewhere.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

TUTORIALS = Path(__file__).parent.parent / "docs" / "tutorials"
CELL = re.compile(r"^# %%(.*)\n", re.MULTILINE)
FOLDER = re.compile(r"^OUT = .*$", re.MULTILINE)
FILE = re.compile(r"^text = .* else (.*)$", re.MULTILINE)
FIGURE = re.compile(r"\(\.\./img/([\w.-]+)\)")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)[^)]+\)")


def notebook(script: Path) -> str:
    """Return the notebook of a script, as text."""
    source = script.read_text()
    title, _, intro = (ast.get_docstring(ast.parse(source)) or script.stem).partition("\n")
    start = f"# {title.rstrip('.')}\n\n{intro.strip()}\n\nIt needs adaptive-tbptt and matplotlib."
    cells = [_cell("markdown", start, 0)]
    _, *parts = CELL.split(source)
    for kind, body in zip(parts[0::2], parts[1::2], strict=True):
        if kind.strip() == "[markdown]":
            text = re.sub("^# ?", "", body.strip(), flags=re.MULTILINE)
            text = LINK.sub(r"\1", FIGURE.sub(r"(figures/\1)", text))
            cells.append(_cell("markdown", text, len(cells)))
        elif not kind.strip():
            code = FOLDER.sub('OUT = Path("figures")', body.strip())
            code = FILE.sub(r'text = \1  # or Path("my.txt").read_text()', code)
            if "sys." not in code:
                code = code.replace("import sys\n", "")
            cells.append(_cell("code", code, len(cells)))
    language = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {
        "cells": cells,
        "metadata": {"kernelspec": language, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _cell(kind: str, text: str, number: int) -> dict[str, Any]:
    lines = text.splitlines(keepends=True)
    cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": lines}
    return cell | {"execution_count": None, "outputs": []} if kind == "code" else cell


def main() -> None:
    """Write the notebook of every tutorial."""
    folder = TUTORIALS / "notebooks"
    folder.mkdir(exist_ok=True)
    for script in sorted(TUTORIALS.glob("*.py")):
        (folder / f"{script.stem}.ipynb").write_text(notebook(script))


if __name__ == "__main__":
    main()
