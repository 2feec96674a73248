"""A run folder with something missing, planted or in the way: nothing lost, nothing silent."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys

import pytest
import torch

from adaptive_tbptt.errors import DamagedFileError, TrainingError
from adaptive_tbptt.train import RunFolder, read_rows, read_toml

from ..small_run import build, final, streams, without_times

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="links, forks and locks")


@pytest.fixture
def run(uninterrupted, tmp_path):
    """A copy of a finished run of three epochs."""
    return shutil.copytree(uninterrupted[0], tmp_path / "run")


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("gone", [["last"], ["last", "best"]])
def test_a_run_whose_last_checkpoint_is_missing_is_not_overwritten(run, gone, resume):
    for name in gone:
        (run / "checkpoints" / f"{name}.safetensors").unlink()
    before = {p: p.read_bytes() for p in run.glob("**/*.*") if p.is_file()}
    with pytest.raises(TrainingError, match=r"last\.safetensors is missing, but .* holds a run"):
        build(run).fit(*streams(), epochs=3, resume=resume)
    assert all(p.read_bytes() == content for p, content in before.items())


def test_a_run_that_ends_before_its_first_window_can_be_resumed(uninterrupted, tmp_path):
    trainer = build(tmp_path)

    def killed(window):
        raise RuntimeError("killed")

    trainer._update = killed
    with pytest.raises(RuntimeError, match="killed"):
        trainer.fit(*streams(), epochs=3)
    again = build(tmp_path)
    again.fit(*streams(), epochs=3, resume=True)
    expected = final(uninterrupted[1])
    assert all(torch.equal(v, expected[k]) for k, v in final(again).items())


@pytest.mark.parametrize("damage", ["deleted", "shortened", "torn", "binary"])
def test_lost_metrics_are_restored_from_the_checkpoint(run, damage):
    path = run / "metrics.jsonl"
    whole = without_times(path.read_text().splitlines())
    if damage == "deleted":
        path.unlink()
    elif damage == "shortened":
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    elif damage == "torn":
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([*lines[:4], lines[4][:20] + "\n", *lines[5:]]))
    else:
        path.write_bytes(b"\xff\x00\n" + path.read_bytes().split(b"\n", 1)[1])
    with pytest.warns(UserWarning, match=r"metrics\.jsonl has \d+ of the \d+ lines.*restored"):
        build(run).fit(*streams(), epochs=3, resume=True)
    found = without_times(path.read_text().splitlines())
    assert len(found) == len(whole)
    for mine, theirs in zip(found, whole, strict=True):
        same = mine.keys() & theirs.keys()
        assert {"step", "event", "epoch", "k", "beta", "relative_bias"} <= same
        assert {k: mine[k] for k in same} == {k: theirs[k] for k in same}
        if mine["event"] == "epoch":
            assert mine == theirs


def test_lines_that_no_checkpoint_knows_are_counted_as_lost(run):
    path = run / "metrics.jsonl"
    count = len(path.read_text().splitlines())
    path.unlink()
    trainer = build(run)
    load = trainer.tbptt.load_state_dict

    def forgetful(saved):
        load(saved)
        trainer.tbptt.history = []

    trainer.tbptt.load_state_dict = forgetful
    with pytest.warns(UserWarning, match=f"restored 3 from .*; {count - 3} are lost"):
        trainer.fit(*streams(), epochs=3, resume=True)


def test_metrics_are_on_disk_before_the_checkpoint_that_counts_them(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def noted(descriptor):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    if not os.path.exists("/proc/self/fd"):
        pytest.skip("needs /proc")
    monkeypatch.setattr(os, "fsync", noted)
    build(tmp_path).fit(*streams(), epochs=1)
    last = max(i for i, name in enumerate(synced) if name.startswith(".last"))
    assert "metrics.jsonl" in synced[:last]


@pytest.mark.parametrize("name", [".lock", "starts.jsonl"])
def test_a_planted_link_does_not_reach_its_target(tmp_path, name):
    target = tmp_path / "precious"
    target.write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(target)
    with pytest.raises(TrainingError, match=rf"cannot write to .*{name}"):
        build(tmp_path / "run").fit(*streams(), epochs=1)
    assert target.read_text() == "kept"


def test_a_file_in_place_of_the_lock_is_not_emptied(tmp_path):
    target = tmp_path / "precious"
    target.write_text("kept")
    (tmp_path / "run").mkdir()
    os.link(target, tmp_path / "run" / ".lock")
    build(tmp_path / "run").fit(*streams(), epochs=1)
    assert target.read_text() == "kept"


def _wait(ready):
    ready.set()
    while True:
        multiprocessing.Event().wait(60)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_worker_does_not_keep_the_lock(tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    with RunFolder(tmp_path).locked():
        worker = context.Process(target=_wait, args=(ready,), daemon=True)
        worker.start()
        assert ready.wait(20)
        held = "from adaptive_tbptt.train import RunFolder\nwith RunFolder(%r).locked(): pass"
        other = [sys.executable, "-c", held % str(tmp_path)]
        assert b"another process" in subprocess.run(other, capture_output=True).stderr
    try:
        subprocess.run(other, check=True)  # the worker still runs
        assert worker.is_alive()
    finally:
        worker.kill()


def test_half_written_files_of_a_killed_run_go_away(run):
    for name in ("checkpoints/.last.safetensors.1.partial", ".metrics.jsonl.1.partial"):
        (run / name).write_bytes(b"half")
    build(run).fit(*streams(), epochs=3, resume=True)
    assert not list(run.glob("**/.*.partial"))


def test_a_logger_that_fails_does_not_end_the_run(uninterrupted):
    class Fails:
        calls = 0

        def log(self, metrics, step):
            self.calls += 1
            raise ConnectionError("the server is gone")

        def close(self):
            raise AssertionError("a logger that failed is left alone")

    fails = Fails()
    trainer = build(loggers=[fails])
    with pytest.warns(UserWarning, match="Fails failed .*the server is gone.*goes on"):
        trainer.fit(*streams(), epochs=3)
    assert fails.calls == 1
    expected = final(uninterrupted[1])
    assert all(torch.equal(v, expected[k]) for k, v in final(trainer).items())


@pytest.mark.parametrize(
    "line", [b"{", b"\xff\xfe{}", b"[" * 100_000, b'{"k": ' + b"9" * 5000 + b"}"]
)
def test_a_damaged_line_names_file_and_line(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"{}\n" + line + b"\n{}\n")
    with pytest.raises(DamagedFileError, match=r"line 2 of .*metrics\.jsonl is not JSON"):
        read_rows(path)


def test_damaged_settings_name_their_file(tmp_path):
    path = tmp_path / "config.toml"
    for content in (b"k = \xff", b"k = ["):
        path.write_bytes(content)
        with pytest.raises(DamagedFileError, match=r"config\.toml cannot be read"):
            read_toml(path)


def test_the_rows_of_metrics_stay_as_they_were(run):
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert list(row)[:3] == ["step", "event", "epoch"]
