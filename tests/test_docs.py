"""The documentation: it builds, its code runs, its commands exist, every public name is in it."""

import contextlib
import importlib.util
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import griffe
import pytest
import typer
from griffe import Class, GriffeLoader

import adaptive_tbptt

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
TUTORIALS = sorted((DOCS / "tutorials").glob("*.py"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:atbptt|atbptt-paper|torchrun|make) [^`]*)`")
# The commands, and the modules they are run as. That of the paper is a package of its own.
COMMANDS = {
    "atbptt": "adaptive_tbptt.cli",
    "adaptive_tbptt": "adaptive_tbptt.cli",
    "atbptt-paper": "atbptt_paper.cli",
    "atbptt_paper": "atbptt_paper.cli",
}
FOREIGN = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)="(?:https?:)?//""")
# What differs from machine to machine: times and costs, which a page shows and no test compares.
TIMED = re.compile(r"\d+\.\d+(?= x\b)|(?<=at )\d+\.\d+(?= times)|\d+(?:\.\d+)?(?= seconds?\b)")
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
PARSED = ["public-code.md"]  # its blocks need repositories of others: they compile, no more
EXTERNAL_MODULES = {"adaptive_tbptt.integrations.lightning": ["TBPTTModule"]}


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *kinds: str) -> list[tuple[str, str]]:
    return [(kind, body) for kind, body in FENCE.findall(page.read_text()) if kind in kinds]


def run_blocks(page: Path) -> list[tuple[str, str, str | None]]:
    """The code of a page as (kind, code, the output that the page shows right below it)."""
    text = page.read_text()
    found = list(FENCE.finditer(text))
    result = []
    for block, after in zip(found, [*found[1:], None], strict=False):
        if block[1] not in ("python", "diff"):
            continue
        shown = None
        if after and after[1] == "text" and not text[block.end() : after.start()].strip():
            shown = after[2]
        result.append((block[1], block[2], shown))
    return result


def close(shown: str, printed: str) -> bool:
    """Tell whether two numbers agree to 5 %, or to two units of the last digit shown."""
    digits = len(shown.partition(".")[2]) if "e" not in shown else 3
    return math.isclose(float(shown), float(printed), rel_tol=0.05, abs_tol=2.01 * 10**-digits)


def differences(shown: str, printed: str) -> list[str]:
    """Compare line by line: words exactly, numbers nearly, spaces and times not at all."""
    shown, printed = (TIMED.sub("TIME", part.strip()) for part in (shown, printed))
    lines, found = shown.splitlines(), printed.splitlines()
    if len(lines) != len(found):
        return [f"{len(lines)} lines are shown, {len(found)} come out:", *found]
    wrong = []
    for line, come in zip(lines, found, strict=True):
        words = [" ".join(NUMBER.sub("#", part).split()) for part in (line, come)]
        numbers = zip(NUMBER.findall(line), NUMBER.findall(come), strict=False)
        if words[0] != words[1] or not all(close(a, b) for a, b in numbers):
            wrong.append(f"shown: {line}\nprinted: {come}")
    return wrong


def test_a_wrong_output_would_be_seen():
    shown = "  0  51.4%  [49.5%, 53.3%]  1.00 x  your loop\nYour loop misses 51%, at 1.5 times."
    again = "0 51.5% [49.4%, 53.3%]  1.32 x  your loop\nYour loop misses 51%, at 9.9 times."
    assert not differences(shown, again)
    assert differences(shown, again.replace("51.5", "61.5"))
    assert differences(shown, again.replace("your", "a"))
    assert differences(shown, again + "\nanother line")


def side(diff: str, sign: str) -> str:
    """One side of a diff: the lines that stay, and those with the sign."""
    lines = diff.splitlines()
    assert all(line[:1] in (" ", "+", "-", "") for line in lines), diff
    return "\n".join(line[1:] for line in lines if line[:1] in (" ", sign, ""))


@pytest.mark.parametrize("page", [p for p in PAGES if run_blocks(p)], ids=name)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    """Blocks of a page share their names; of a diff the new side runs, the old one compiles.

    What a block prints is compared with the text block right below it.
    """
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for kind, body, shown in run_blocks(page):
        if kind == "diff":
            compile(side(body, "-"), name(page), "exec")
            body = side(body, "+")
        if page.name in PARSED:
            compile(body, name(page), "exec")
            continue
        printed = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
            warnings.simplefilter("ignore", adaptive_tbptt.TruncationWarning)
            exec(compile(body, name(page), "exec"), names)
        if shown is not None:
            wrong = differences(shown, printed.getvalue())
            assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_shown_output_is_checked_or_says_why_not(page):
    """A text block stands right below the code that prints it, or below a comment."""
    text, last = page.read_text(), 0
    found = list(FENCE.finditer(text))
    for before, block in zip([None, *found], found, strict=False):
        gap = text[last : block.start()].rstrip()
        printed = before and before[1] in ("python", "diff") and not gap
        if block[1] == "text" and not printed and page.name != "command-line.md":
            why = re.search(r"<!-- not run: .+ -->$", gap)
            assert why, f"say why nobody checks this block: {block[2][:200]}"
        last = block.end()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_says_what_it_is(page):
    """Else it would not be checked."""
    fences = re.findall(r"^ *```(.*)$", page.read_text(), re.MULTILINE)
    assert set(fences[::2]) <= {"python", "diff", "sh", "text"}
    assert set(fences[1::2]) <= {""}


def commands() -> list[str]:
    found = []
    for page in PAGES:
        found += [line for _, body in blocks(page, "sh") for line in body.splitlines()]
        found += INLINE.findall(page.read_text())
    for script in TUTORIALS:
        found += INLINE.findall(script.read_text())
    return sorted(set(found))


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_docs_exists(line):
    """Every option that is named exists; nothing is run."""
    words = shlex.split(line, comments=True)
    if "=" in words[0]:  # a variable for a script of the reader's own
        return
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
        return
    if words[0] in ("cd", "pip", "python"):
        assert words[0] == "pip" or (ROOT / words[1]).exists()
        return
    if words[0] == "torchrun":
        if "-m" not in words:
            return
        words = words[words.index("-m") + 1 :]
    app = pytest.importorskip(COMMANDS[words[0]]).app
    command = typer.main.get_command(app)
    if "..." in words or {"COMMAND", "NAME"} & set(words[:2]):  # a pattern, not a command
        return
    rest, path = words[1:], words[0]
    while hasattr(command, "commands") and rest and rest[0] in command.commands:
        command, rest, path = command.commands[rest[0]], rest[1:], f"{path} {rest[0]}"
    assert not (hasattr(command, "commands") and rest and not rest[0].startswith("-")), path
    if hasattr(command, "commands"):  # such as --install-completion, which is not to be run
        known = {"--help", *(word for p in command.params for word in p.opts)}
        assert not rest or rest[0] in known
        return
    if rest not in ([], ["--help"]):  # the name of a command alone is one in a sentence
        with contextlib.suppress(typer.Exit):  # the help was asked for
            command.make_context(path, rest)


def build(folder: Path) -> None:
    """Build the documentation as `make docs` does; warnings are errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr


@pytest.mark.xdist_group("docs")
def test_the_site(tmp_path):
    """One test, since to build it takes long."""
    build(tmp_path / "site")
    assert foreign(tmp_path / "site") == []
    assert left_out(tmp_path / "site") == []
    assert undocumented(tmp_path / "site") == []


def foreign(site: Path) -> list[Path]:
    """Return the pages that would fetch something from elsewhere."""
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    found = [page for page in pages if FOREIGN.search(page.read_text())]
    styles = [s for s in site.rglob("*.css") if re.search(r"url\((?:https?:)?//", s.read_text())]
    return found + styles


def left_out(site: Path) -> list[Path]:
    """Return the results and tutorials that the site does not show."""
    folder = ROOT / "benchmarks" / "results" / "speed"
    parts = [folder / name for name in ("README.md", "bench.md", "memory.md")]
    speed = (site / "benchmarks.html").read_text()
    missing = [part for part in parts if part.read_text().splitlines()[-1] not in speed]
    tables = (site / "results.html").read_text()
    for table in sorted(ROOT.glob("paper/results/*/table.md")):
        if table.read_text().partition("\n")[0].removeprefix("# ") not in tables:
            missing.append(table)
    for script in TUTORIALS:
        if "What it printed" not in (site / "tutorials" / f"{script.stem}.html").read_text():
            missing.append(script)
    pictures = [p for kind in ("paper", "benchmarks") for p in ROOT.glob(f"{kind}/results/*/*.png")]
    return missing + [p for p in pictures if not (site / p.relative_to(ROOT)).exists()]


def public_objects():
    """Every public name: those of the package and of its rooms."""
    loader = GriffeLoader(search_paths=[ROOT / "src"])
    loader.load("adaptive_tbptt")
    places = {}
    for one in adaptive_tbptt.__all__:
        room = getattr(adaptive_tbptt, one)
        names = room.__all__ if isinstance(room, ModuleType) else []
        places |= {n: f"adaptive_tbptt.{one}.{n}" for n in names}
        if not names:
            places[one] = f"adaptive_tbptt.{one}"
    for module, names in EXTERNAL_MODULES.items():
        places |= {n: f"{module}.{n}" for n in names}
    found = {n: loader.modules_collection[path] for n, path in places.items()}
    return {n: o.final_target if o.is_alias else o for n, o in found.items()}


OBJECTS = public_objects()
ALIASES = [n for n, found in OBJECTS.items() if found.is_attribute]  # of types


def members(cls: Class) -> dict[str, griffe.Object]:
    return {n: m for n, m in cls.all_members.items() if not n.startswith("_")}


def described(cls: Class, member: str) -> bool:
    """Tell whether the docstring of a class, or of a base, has a line for the member."""
    texts = [c.docstring.value for c in (cls, *cls.mro()) if c.docstring]
    return any(re.search(rf"^\s*{member}: ", text, re.MULTILINE) for text in texts)


@pytest.mark.parametrize("public", OBJECTS)
def test_a_public_name_has_a_docstring(public):
    found = OBJECTS[public]
    assert found.docstring or public in ALIASES, public
    if found.is_class:
        silent = [
            n for n, m in members(found).items() if not m.docstring and not described(found, n)
        ]
        assert not silent


def listed() -> dict[str, list[str]]:
    """The members that a page of the API names for a class; other classes show all of their own."""
    found = {}
    for page in sorted((DOCS / "api").glob("*.md")):
        for part in page.read_text().split("::: ")[1:]:
            chosen = re.search(r"members: (?:\[(.*)\]|false)", part)
            if chosen:
                names = (chosen[1] or "").split(", ")
                found[part.split()[0].rpartition(".")[2]] = [n for n in names if n]
    return found


def undocumented(site: Path) -> list[str]:
    """Return what the API pages lack, and the internals that they show."""
    html = "\n".join(page.read_text() for page in sorted((site / "api").glob("*.html")))
    heads = re.split(r'<h2 id="adaptive_tbptt\.(?:[\w.]+\.)?(\w+)" class="doc', html)
    sections = dict(zip(heads[1::2], heads[2::2], strict=True))
    wrong = [public for public in OBJECTS if public not in sections and public not in ALIASES]
    wrong += [alias for alias in ALIASES if f"<code>{alias}</code>" not in html]
    wrong += re.findall(r'id="(adaptive_tbptt\.(?:[\w.]+\.)?_\w+)" class="doc', html)
    chosen = listed()
    for public, found in OBJECTS.items():
        if not found.is_class or public in wrong:
            continue
        own = {n for n in found.members if not n.startswith("_")}
        shown = set(re.findall(rf'<h3 id="[\w.]+\.{public}\.(\w+)"', sections[public]))
        wrong += [f"{public}.{n} is inherited" for n in shown - own]
        for n in chosen.get(public, own):
            mark = rf'(?:id|title)="adaptive_tbptt\.[\w.]*\b{n}"|<code>{n}</code>'
            if not re.search(mark, sections[public]):
                wrong.append(f"{public}.{n}")
    return wrong


def tool(stem: str) -> ModuleType:
    """Import a script of `tools/`."""
    spec = importlib.util.spec_from_file_location(stem, ROOT / "tools" / f"{stem}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", TUTORIALS, ids=lambda s: s.stem)
def test_a_notebook_is_that_of_its_script(script):
    text = (script.parent / "notebooks" / f"{script.stem}.ipynb").read_text()
    assert text == tool("make_notebooks").notebook(script), "run python tools/make_notebooks.py"


@pytest.mark.parametrize("script", TUTORIALS, ids=lambda s: s.stem)
def test_a_notebook_is_valid(script):
    """As the schema of nbformat 4.5 has it; and its code compiles, with the script's names."""
    found = json.loads((script.parent / "notebooks" / f"{script.stem}.ipynb").read_text())
    assert set(found) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in found["cells"]]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[\w-]{1,64}", one) for one in ids)
    for cell in found["cells"]:
        keys = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            keys |= {"execution_count", "outputs"}
        assert set(cell) == keys
        assert cell["cell_type"] in ("markdown", "code")
        assert "".join(cell["source"]).strip()
    code = "\n".join("".join(c["source"]) for c in found["cells"] if c["cell_type"] == "code")
    compile(code, script.stem, "exec")
    assert "argv" not in code
    assert "../" not in "".join(part for cell in found["cells"] for part in cell["source"])


@pytest.mark.parametrize("script", TUTORIALS, ids=lambda s: s.stem)
def test_a_tutorial_runs(script, tmp_path):
    command = [sys.executable, str(script), str(tmp_path / "out")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    made = {p.name for p in (tmp_path / "out").iterdir()}
    assert made
    assert made == set(re.findall(r"\.\./img/([\w.-]+)", script.read_text()))
    assert made <= {p.name for p in (DOCS / "img").iterdir()}


def test_the_picture_of_the_readme_is_made_by_a_script(tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "readme_figure.py")]
    command += ["--out", str(tmp_path / "side-by-side.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "side-by-side.png").stat().st_size > 10_000


def test_the_picture_of_adaptation_is_made_by_a_script(tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "adapting_figure.py"), "--epochs", "1"]
    command += ["--out", str(tmp_path / "adapting.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "adapting.png").stat().st_size > 10_000
