"""What the documentation takes from elsewhere in the repository: tutorials, examples, results.

MkDocs calls the functions named `on_...`. Nothing is copied by hand: a tutorial's page is its
script, an example's page is the example, and the results' pages are the files under
`paper/results/` and `benchmarks/results/`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from textwrap import indent
from typing import Any

from markdown.extensions.toc import slugify
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
RESULTS = (ROOT / "paper" / "results", ROOT / "benchmarks" / "results")
FIGURES = ("*.png", "*.svg")
CELL = re.compile(r"^# %%(.*)\n", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and pictures that do not lie under `docs/`."""
    for script in sorted((ROOT / "docs" / "tutorials").glob("*.py")):
        files.append(File.generated(config, page_name(script, "tutorials"), content=tell(script)))
    for script in sorted((ROOT / "examples").glob("*.py")):
        page = File.generated(config, page_name(script, "examples"), content=show(script))
        page.inclusion = page.inclusion.NOT_IN_NAV
        files.append(page)
    for folder in RESULTS:
        for picture in pictures(folder):
            name = picture.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put results in, and point links into the repository at the pages made of it."""
    markdown = re.sub(r"<!-- include: (\S+) -->", lambda m: include(m[1]), markdown)
    markdown = markdown.replace("<!-- tables -->", tables())
    markdown = re.sub(r"\(tutorials/(\w+)\.py\)", r"(tutorials/\1.md)", markdown)
    up = "../" * page.file.src_uri.count("/")
    return re.sub(r"\((?:\.\./)+examples/(\w+)\.py\)", rf"({up}examples/\1.md)", markdown)


def page_name(script: Path, folder: str) -> str:
    """Return the page of a script."""
    return f"{folder}/{script.stem}.md"


def cells(script: Path) -> list[tuple[str, str]]:
    """Split a script at its `# %%` lines into (kind, source): '[markdown]', '[check]' or code."""
    _, *parts = CELL.split(script.read_text())
    return [(kind.strip(), body) for kind, body in zip(parts[0::2], parts[1::2], strict=True)]


def tell(script: Path) -> str:
    """Turn a tutorial into a page: its docstring, its text, its code, and what it printed."""
    title, intro = docstring(script)
    parts = [f"# {title}", intro, f"[Download as a notebook](notebooks/{script.stem}.ipynb)"]
    for kind, body in cells(script):
        if kind == "[markdown]":
            parts.append(re.sub("^# ?", "", body, flags=re.MULTILINE))
        elif not kind:
            parts.append(f"```python\n{body.strip()}\n```")
    printed = script.with_suffix(".txt")
    if printed.exists():
        parts.append(f"## What it printed\n\n```text\n{printed.read_text().strip()}\n```")
    parts.append(
        f"The page is made of `docs/tutorials/{script.name}`; run it with "
        f"`python docs/tutorials/{script.name} [FOLDER]`."
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def show(script: Path) -> str:
    """Turn an example into a page: its docstring, then all of it."""
    title, intro = docstring(script)
    return f"# examples/{script.name}\n\n{title}\n\n{intro}\n\n```python\n{script.read_text()}```\n"


def docstring(script: Path) -> tuple[str, str]:
    """Return the first line of a script's docstring, and the rest."""
    text = ast.get_docstring(ast.parse(script.read_text())) or script.stem
    title, _, rest = text.partition("\n")
    return title.rstrip("."), rest.strip()


def pictures(folder: Path) -> list[Path]:
    """Return the figures of a folder and of those in it."""
    return sorted(path for kind in FIGURES for path in folder.rglob(kind))


def include(name: str) -> str:
    """Return a file of the repository, its headings one level down; nothing if it is not there."""
    path = ROOT / name
    if not path.exists():
        return ""
    folder = path.parent.relative_to(ROOT).as_posix()
    text = re.sub(r"^#", "##", path.read_text(), flags=re.MULTILINE)
    # The stories of other tables are on the same page.
    text = re.sub(
        r"\]\((\.\./[\w-]+/README\.md)\)", lambda m: f"](#{anchor(path.parent / m[1])})", text
    )
    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({folder}/\1)", text)


def anchor(path: Path) -> str:
    """Return the anchor of a page's title."""
    return slugify(path.read_text().partition("\n")[0].lstrip("# "), "-")


def tables() -> str:
    """Return every story of the paper, its table and figures folded in, in order of name."""
    parts = []
    for table in sorted(RESULTS[0].glob("*/table.md")):
        folder = table.parent.relative_to(ROOT)
        story = include(f"{folder}/README.md")
        folded = [include(f"{folder}/table.md")]
        folded += [
            f"![{p.stem} of {table.parent.name}]({folder}/{p.name})"
            for p in pictures(table.parent)
            if p.name not in story
        ]
        inside = indent("\n\n".join(folded), "    ")
        parts += [story, f'??? note "Table and figures: {table.parent.name}"\n\n{inside}']
    return "\n\n".join(parts) or "No table is complete yet."
