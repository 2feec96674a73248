"""What the shell completes for `atbptt`."""

import os
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from adaptive_tbptt.cli import app

from .command_line import complete


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Run folders at two depths, and folders that are none."""
    for folder in ("runs/one", "runs/two", "own", "runs/deep/down/three"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "metrics.jsonl").touch()
    (tmp_path / "runs" / "cache").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("che", ["check-bias"]),
        ("diagnose --se", ["--seconds", "--segments"]),
        ("lookback --split ", ["train", "valid", "test"]),
        ("check-bias ", ["own", "runs/one", "runs/two"]),
        ("diagnose runs/t", ["runs/two"]),
        ("diagnose runs/deep/", ["runs/deep/down/three"]),
        ("report runs/one runs/t", ["runs/two"]),
        ("diagnose nowhere/", []),
        ("report --out ", []),  # the shell completes files
    ],
)
def test_values_are_completed(runs, line, found):
    assert complete(app, "atbptt", line) == found


def test_a_run_folder_is_completed_from_the_root(runs):
    assert complete(app, "atbptt", f"diagnose {runs}/runs/o") == [f"{runs}/runs/one"]


@pytest.mark.parametrize(
    ("shell", "script", "start"),
    [
        ("bash", ".bash_completions/atbptt.sh", ".bashrc"),
        ("zsh", ".zfunc/_atbptt", ".zshrc"),
        ("fish", ".config/fish/completions/atbptt.fish", None),
    ],
)
def test_completion_can_be_installed(tmp_path, monkeypatch, shell, script, start):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    done = CliRunner().invoke(app, ["--install-completion", shell], prog_name="atbptt")
    assert done.exit_code == 0, done.output
    assert "_ATBPTT_COMPLETE=complete_" in (tmp_path / script).read_text()
    assert start is None or (tmp_path / start).exists()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_with_the_script_that_is_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    done = CliRunner().invoke(app, ["--show-completion", "bash"], prog_name="atbptt")
    (tmp_path / "script").write_text(done.output)
    command = tmp_path / "atbptt"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m adaptive_tbptt "$@"\n')
    command.chmod(0o755)
    typed = "source script; COMP_WORDS=(atbptt che); COMP_CWORD=1; _atbptt_completion atbptt; "
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    found = subprocess.run(
        ["bash", "-c", typed + 'echo "${COMPREPLY[@]}"'],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout == "check-bias\n"
