"""What a run folder holds: short numbers, and the commit of the code that wrote it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import adaptive_tbptt
from adaptive_tbptt.train.files import short_number


def test_numbers_in_files_are_short():
    assert [short_number(x) for x in (1.23456789, float("nan"), 3, None)] == [1.2346, None, 3, None]


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_the_commit_is_that_of_this_code_and_says_if_it_was_changed(tmp_path):
    package = tmp_path / "lib" / "adaptive_tbptt"
    shutil.copytree(
        Path(adaptive_tbptt.__file__).parent, package, ignore=shutil.ignore_patterns("*.pyc")
    )

    def git(*command):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", *who, *command], cwd=tmp_path, check=True, capture_output=True
        )
        return done.stdout.decode().strip()

    def seen():
        code = "from adaptive_tbptt.train.provenance import commit; print(commit())"
        run = [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(package.parent)!r}); {code}",
        ]
        return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "other.txt").touch()
    (tmp_path / ".gitignore").write_text("__pycache__\n")
    git("add", "other.txt", ".gitignore")
    git("commit", "-qm", "of another project")
    assert seen() == "unknown"
    git("add", ".")
    git("commit", "-qm", "of this one")
    assert seen() == git("rev-parse", "--short=12", "HEAD")
    with (package / "train" / "provenance.py").open("a") as file:
        file.write("# changed\n")
    assert seen() == git("rev-parse", "--short=12", "HEAD") + "+changes"
