"""What a run folder may be asked for: to start, to go on, to be looked at while it is written."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from paper.tests.test_cli import call, train

import adaptive_tbptt
from adaptive_tbptt.train import provenance as origin
from adaptive_tbptt.train.files import read_rows, short_number
from atbptt_paper.tasks.copy_data import read_arrays
from atbptt_paper.tasks.corpus import read_corpus
from atbptt_paper.tasks.point_task import PRESETS as POINT


def test_what_was_refused_can_be_started_anew(tmp_path):
    out = str(tmp_path / "run")
    assert "k_min" in train("--delta", "0.5", "--k-min", "30", "--out", out, code=2)
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "config.toml").write_text('task = "copy"\nk = 3\n')  # stopped at once
    train("--k", "4", "--out", out)
    assert "already holds a run" in train("--k", "4", "--out", out, code=2)


def test_a_run_cannot_go_back_to_fewer_epochs(tmp_path):
    out = tmp_path / "run"
    train("--k", "4", "--out", str(out))
    before = (out / "config.toml").read_text()
    text = train("--k", "4", "--out", str(out), "--resume", "--epochs", "1", code=2)
    assert "holds 2 epochs already, more than 1" in text
    assert (out / "config.toml").read_text() == before


def test_a_line_that_is_still_being_written_does_not_count(tmp_path):
    out = tmp_path / "run"
    train("--k", "4", "--out", str(out))
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"event": "epo')
    assert len(read_rows(out / "metrics.jsonl")) == 2
    call("check-bias", str(out), "--delta", "0.5", "--segments", "6")
    with (out / "check_bias.jsonl").open("a") as file:
        file.write(json.dumps({"x": 1}) + "\n")
    call("report", str(out))


def test_a_diagnosis_is_shown_though_its_figure_cannot_be(tmp_path):
    out = tmp_path / "run"
    train("--k", "4", "--out", str(out), "--k-min", "3")
    text = call("diagnose", str(out), "--window", "2", "--out", str(tmp_path / "x.foo"), code=2)
    assert "outcome" in text
    assert "'foo' is not supported" in text


def test_settings_that_cannot_be_used_name_their_file(tmp_path):
    (tmp_path / "config.toml").write_text('task = "copy"\nk = "ten"\n')
    assert "config.toml cannot be used" in call("diagnose", str(tmp_path), code=2)


@pytest.mark.parametrize(
    ("option", "value"), [("time_scale", -1.0), ("train_sequences", 0), ("lr_decay", -1.0)]
)
def test_values_that_make_no_sense(option, value):
    with pytest.raises(ValueError, match=option):
        POINT["quick"].changed(**{option: value})


def test_arrays_that_are_cut_off_or_negative(tmp_path):
    path = tmp_path / "a.npz"
    names = [
        f"{split}_{part}" for split in ("train", "valid", "test") for part in ("inputs", "targets")
    ]
    np.savez(path, **dict.fromkeys(names, np.array([[0], [-1]])))
    with pytest.raises(ValueError, match="a symbol is negative"):
        read_arrays(path)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ValueError, match="cannot read copy arrays"):
        read_arrays(path)


def test_text_that_is_not_utf8_names_its_file_and_leaves_nothing(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_bytes(b"caf\xe9\n" if split == "valid" else b"a b\n")
    with pytest.raises(ValueError, match=r"valid\.txt is not UTF-8"):
        read_corpus(tmp_path, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_empty_split_is_named(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("" if split == "valid" else "a b c\n" * 400)
    text = call(
        "train", "language", "--preset", "ptb-small", "--dataset", "text", "--data", str(tmp_path),
        "--k", "4", "--out", str(tmp_path / "run"), code=2,
    )  # fmt: skip
    assert "the valid split has 0 tokens" in text


def test_a_surprise_is_a_sentence_too(monkeypatch):
    def fails(*args):
        raise KeyError("x")

    monkeypatch.setattr("atbptt_paper.experiments.cells.read_cells", fails)
    assert "error: KeyError, --debug shows where: 'x'" in call("findings", "copy-fixed", code=1)


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
    assert origin.version()
