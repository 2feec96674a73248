"""Cells as Ray tasks, against a real cluster that these tests start on this machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from atbptt_paper.experiments.cells import Cell, fingerprint, grid, write_json
from atbptt_paper.experiments.ray_runner import _place, _train_here, run_cells_on_ray
from atbptt_paper.experiments.runner import run_cells
from paper_helpers import TINY, call, start

# One cluster for all of them, also where tests run side by side.
pytestmark = pytest.mark.xdist_group("ray")
READS_PROC = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
CELLS = grid(TINY.changed(epochs=1), [{"k": 2}, {"k": 3}, {"delta": 0.5}], 1)
# Long enough to be killed in the middle.
LONG = Cell(TINY.changed(delta=0.3, epochs=60, error_bar_every=0), 0)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(condition, seconds=240.0):
    """Return what `condition()` gives as soon as it is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return found


def processes(test):
    """Return the ids of the processes whose folder below /proc passes a test."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if test(path):
                found.append(int(path.name))
        except OSError:  # ended, or not ours
            continue
    return found


def alone(place):
    """Return an environment in which Ray finds no other cluster, and keeps its token to itself."""
    env = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RAY_AUTH_MODE")}
    return env | {"TMPDIR": place, "HOME": place}


def nothing_runs_in(place):
    """Wait for the end of every process that was started with this temporary folder."""
    mark = f"TMPDIR={place}\0".encode()
    wait_for(lambda: not processes(lambda p: mark in (p / "environ").read_bytes()), 15)


@pytest.fixture(scope="module")
def cluster():
    """A head node with two CPUs; it yields its address and the temporary folder of its workers."""
    pytest.importorskip("ray", reason="needs the extra: pip install 'adaptive-tbptt-paper[ray]'")
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as place:  # sockets need short paths
        port = free_port()
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block",
                   "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2",
                   "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={place}",
                   f"--ray-client-server-port={free_port()}",
                   "--object-store-memory=100000000"]  # fmt: skip
        log = Path(place) / "start.log"
        with log.open("w") as file:
            process = start(command, stdout=file, stderr=file, env=alone(place))
        wait_for(lambda: process.poll() is not None or "Ray runtime started" in log.read_text())
        assert process.poll() is None, log.read_text()
        yield f"127.0.0.1:{port}", Path(place)
        process.terminate()
        process.wait(30)
        nothing_runs_in(place)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The same cells by the local executor."""
    folder = tmp_path_factory.mktemp("local")
    assert run_cells([LONG, *CELLS], folder, folder / "work", jobs=2) == []
    return folder


def numbers(folder, cell):
    """What must not depend on where a cell ran."""
    content = json.loads((folder / "cells" / f"{cell.name}.json").read_text())
    content["curves"].pop("seconds", None)
    return {k: v for k, v in content.items() if k not in ("seconds", "origin")}


def test_the_cells_are_those_of_the_local_executor_and_finished_ones_are_skipped(
    cluster, local, tmp_path
):
    config = fingerprint(CELLS[0].config)
    kept = {"setting": "kept", "init": 0, "epochs": 1, "curves": {}, "config": config}
    write_json(tmp_path / "cells" / f"{CELLS[0].name}.json", kept)
    said, work = [], tmp_path / "work"
    assert run_cells_on_ray(CELLS, tmp_path, work, address=cluster[0], say=said.append) == []
    assert said[0] == "1 of 3 cells are finished"
    assert json.loads((tmp_path / "cells" / f"{CELLS[0].name}.json").read_text()) == kept
    for cell in CELLS[1:]:
        assert numbers(tmp_path, cell) == numbers(local, cell)
        assert any(text.startswith(f"{cell.name}: finished after") for text in said)
    assert not list((cluster[1] / _place(work)).iterdir())  # nothing stays on the worker
    said.clear()
    nowhere = f"127.0.0.1:{free_port()}"
    assert run_cells_on_ray(CELLS, tmp_path, tmp_path, address=nowhere, say=said.append) == []
    assert said == ["3 of 3 cells are finished"]


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right there")
def test_a_folder_that_others_may_have_filled_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    (tmp_path / "theirs").mkdir(mode=0o700)
    for name in ("open", "link", "theirs"):
        if name == "theirs":
            monkeypatch.setattr(os, "getuid", lambda: -1)
        with pytest.raises(PermissionError, match=f"{name} is not a folder that only you"):
            _train_here(CELLS[0], name)
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert json.loads(_train_here(CELLS[0], "new"))["epochs"] == 1
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


class Killer(threading.Thread):
    """Kills the process that trains a cell once it has a checkpoint, and watches what follows."""

    def __init__(self, run):
        super().__init__(daemon=True)
        self.metrics = run / "metrics.jsonl"
        self.checkpoint = run / "checkpoints" / "last.safetensors"
        self.killed, self.lines_killed, self.lines_after = None, 0, []

    def trainers(self):
        """Return the processes that have the metrics of the run open."""
        return processes(
            lambda p: any(os.readlink(fd) == str(self.metrics) for fd in (p / "fd").iterdir())
        )

    def epochs(self):
        if not self.metrics.exists():  # the first checkpoint is written before
            return 0
        return self.metrics.read_text().count('"event": "epoch"')

    def run(self):
        wait_for(lambda: self.checkpoint.exists() and self.epochs() >= 10)
        self.killed = wait_for(self.trainers)[0]
        os.kill(self.killed, signal.SIGKILL)
        self.lines_killed = self.epochs()
        while self.metrics.exists():
            try:
                self.lines_after.append(self.epochs())
            except OSError:  # the folder has just been removed
                break
            time.sleep(0.002)


@READS_PROC
def test_a_cell_whose_worker_is_killed_is_run_again_from_its_checkpoint(cluster, local, tmp_path):
    killer = Killer(cluster[1] / _place(tmp_path) / LONG.name)
    killer.start()
    assert run_cells_on_ray([LONG], tmp_path, tmp_path, address=cluster[0]) == []
    killer.join(10)
    assert 10 <= killer.lines_killed < LONG.config.epochs
    # The second process goes on: it never goes back by more than the epoch it was in.
    assert min(killer.lines_after) >= killer.lines_killed - 1
    assert max(killer.lines_after) > killer.lines_killed
    assert numbers(tmp_path, LONG) == numbers(local, LONG)


@READS_PROC
def test_retries_have_an_end_and_the_next_call_goes_on(cluster, local, tmp_path):
    killer = Killer(cluster[1] / _place(tmp_path) / LONG.name)
    killer.start()
    said = []
    failed = run_cells_on_ray(
        [LONG], tmp_path, tmp_path, address=cluster[0], retries=0, say=said.append
    )
    assert failed == [LONG.name]
    assert said[-1] == f"{LONG.name}: failed, see {tmp_path / LONG.name}.log"
    assert "died" in (tmp_path / f"{LONG.name}.log").read_text()
    assert run_cells_on_ray([LONG], tmp_path, tmp_path, address=cluster[0]) == []
    killer.join(10)
    assert min(killer.lines_after) >= killer.lines_killed - 1
    assert max(killer.lines_after) > killer.lines_killed
    assert numbers(tmp_path, LONG) == numbers(local, LONG)


def test_a_cell_that_fails_is_named_and_the_others_go_on(cluster, local, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad = Cell(TINY.changed(k=4, data="nowhere.npz", epochs=1), 0)
    said = []
    failed = run_cells_on_ray(
        [bad, CELLS[0]], tmp_path, tmp_path, address=cluster[0], say=said.append
    )
    assert failed == ["K-4_init-0"]
    assert f"K-4_init-0: failed, see {tmp_path / 'K-4_init-0'}.log" in said
    log = (tmp_path / "K-4_init-0.log").read_text()
    assert "train_cell" in log  # where it happened
    assert "\x1b" not in log
    assert str(tmp_path / "nowhere.npz") in log  # workers have another working directory
    assert numbers(tmp_path, CELLS[0]) == numbers(local, CELLS[0])


def test_an_address_where_nothing_answers_is_a_sentence_soon(cluster, tmp_path):
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="no Ray cluster answers at"):
        run_cells_on_ray(CELLS, tmp_path, tmp_path, address=f"127.0.0.1:{free_port()}")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=f"no Ray cluster answers at {address}"):
            run_cells_on_ray(CELLS, tmp_path, tmp_path, address=address, patience=1.0)
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        run_cells_on_ray(CELLS, tmp_path, tmp_path, address="somewhere")
    assert time.monotonic() - began < 10.0


REPRODUCE = ["reproduce", "copy-fixed", "--preset", "quick", "--only", "K=30"]


def test_without_an_address_ray_is_started_here_and_stopped(tmp_path):
    pytest.importorskip("ray", reason="needs the extra: pip install 'adaptive-tbptt-paper[ray]'")
    command = [sys.executable, "-m", "atbptt_paper", *REPRODUCE, "--executor", "ray",
               "--epochs", "1", "--out", str(tmp_path), "--work", str(tmp_path)]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as place:
        env = alone(place)
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        nothing_runs_in(place)
    assert "K-30_init-0: finished after" in done.stdout


def test_a_table_from_the_command_line_is_the_same(cluster, tmp_path):
    ours, theirs = tmp_path / "ray", tmp_path / "local"
    ends = ["--epochs", "1", "--work", str(tmp_path / "work"), "--out"]
    text = call(*REPRODUCE, "--executor", "ray", "--address", cluster[0], *ends, str(ours))
    assert "K-30_init-0: finished after" in text
    assert "| K=30 | 1 | 1 |" in text
    call(*REPRODUCE, *ends, str(theirs))
    name = Cell(TINY.changed(k=30), 0)
    assert numbers(ours, name) == numbers(theirs, name)
    assert {p.name for p in ours.iterdir()} == {p.name for p in theirs.iterdir()}


@READS_PROC
def test_ctrl_c_cancels_the_tasks_and_keeps_their_checkpoints(cluster, tmp_path):
    command = [sys.executable, "-m", "atbptt_paper", *REPRODUCE, "--executor", "ray",
               "--epochs", "10000", "--out", str(tmp_path), "--work", str(tmp_path)]  # fmt: skip
    # The address comes from the environment here.
    env = os.environ | {"RAY_ADDRESS": cluster[0]}
    process = start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    killer = Killer(cluster[1] / _place(tmp_path) / "K-30_init-0")  # for its eyes alone
    wait_for(killer.trainers)
    time.sleep(0.5)  # into the first epoch, before the checkpoint of its end is due
    before = killer.checkpoint.stat().st_mtime_ns
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "waiting for the cells" in out
    assert killer.checkpoint.stat().st_mtime_ns > before
    wait_for(lambda: not killer.trainers(), 10)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--executor", "rya"], "unknown executor 'rya'; did you mean ray?"),
        (["--address", "127.0.0.1:6379"], "add --executor ray"),
        (["--executor", "ray", "--jobs", "2"], "--jobs is for --executor local"),
    ],
)
def test_wrong_use_is_a_sentence(args, says, tmp_path):
    text = call(*REPRODUCE, *args, "--out", str(tmp_path / "out"), code=2)
    assert says in text
    assert not (tmp_path / "out").exists()


def test_a_missing_extra_gives_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "atbptt_paper.experiments.ray_runner")
    text = call(*REPRODUCE, "--executor", "ray", "--out", str(tmp_path / "out"), code=2)
    assert "pip install 'adaptive-tbptt-paper[ray]'" in text
    assert not (tmp_path / "out").exists()
