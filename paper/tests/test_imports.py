"""The paper's package uses public names of the library only, and nothing in it imports upwards."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

PAPER = Path(__file__).parents[1]
FILES = [*sorted((PAPER / "src").rglob("*.py")), *sorted((PAPER / "tests").glob("*.py"))]
LIBRARY = "adaptive_tbptt"


def private(code):
    """Return what a file takes from the library that is not in the `__all__` it takes it from."""
    tree = ast.parse(code)
    found, modules = [], {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.partition(".")[0] == LIBRARY:
                    modules[name.asname or LIBRARY] = LIBRARY
                    if name.asname or "." not in name.name:
                        modules[name.asname or LIBRARY] = name.name
                    found += [] if is_public(name.name) else [name.name]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == LIBRARY:
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                modules[name.asname or name.name] = whole
                found += [] if is_public(whole) else [whole]
    for node in ast.walk(tree):
        whole = dotted(node, modules)
        if whole is not None and not is_public(whole):
            found.append(whole)
    return found


def dotted(node, modules):
    """Return the full name of an attribute such as `at.loop.Clip`; None where it is none."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    if not parts or not isinstance(node, ast.Name) or node.id not in modules:
        return None
    return ".".join([modules[node.id], *parts])


def is_public(whole):
    """Tell whether every part of a dotted name is in the `__all__` of the part before it.

    Modules at the top of the package are public where they have an `__all__`, rooms too. What lies
    inside a class or a function is its own business.
    """
    first, *rest = whole.split(".")
    here = importlib.import_module(first)
    for depth, part in enumerate(rest):
        if not hasattr(here, "__path__") and not hasattr(here, "__all__"):
            return True
        if part not in here.__all__:
            top = depth == 0 and not part.startswith("_")
            try:
                module = importlib.import_module(f"{first}.{part}") if top else None
            except ModuleNotFoundError:
                module = None
            if module is None or not hasattr(module, "__all__"):
                return False
            here = module
        else:
            here = getattr(here, part)
    return True


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PAPER).as_posix())
def test_only_public_names_are_used(path):
    assert private(path.read_text()) == []


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import adaptive_tbptt as at\nat.probe, at.loop.Clip, at.BiasTolerance.update", []),
        ("from adaptive_tbptt.train import Trainer, read_rows", []),
        ("from adaptive_tbptt.errors import unknown_name", []),
        ("import adaptive_tbptt as at\nat.loop.adaptive", ["adaptive_tbptt.loop.adaptive"]),
        (
            "from adaptive_tbptt.loop.adaptive import AdaptiveTBPTT",
            ["adaptive_tbptt.loop.adaptive.AdaptiveTBPTT"],
        ),
        ("from adaptive_tbptt.train import files", ["adaptive_tbptt.train.files"]),
        ("from adaptive_tbptt._torch import denormals", ["adaptive_tbptt._torch.denormals"]),
        ("import adaptive_tbptt.train.files", ["adaptive_tbptt.train.files"]),
        ("from adaptive_tbptt import _torch", ["adaptive_tbptt._torch"]),
        ("def f():\n    from adaptive_tbptt import nothing", ["adaptive_tbptt.nothing"]),
    ],
)
def test_a_private_name_is_seen(code, names):
    assert private(code) == names


def test_nothing_imports_upwards():
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; "
               "lint()", "--config", "pyproject.toml", "--no-cache"]  # fmt: skip
    done = subprocess.run(command, cwd=PAPER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 kept, 0 broken" in done.stdout
