"""A process that hangs is noticed after the time one chose, and a second Ctrl-C does not wait."""

import os
import signal
import subprocess
import sys
import time

import pytest

from adaptive_tbptt.distributed import process_group

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGSTOP")

# Both ranks train; the second stops itself after the first epoch.
RANK = """
import os, signal, sys
import torch
from tests.small_run import build, streams
from adaptive_tbptt.distributed import process_group
from adaptive_tbptt.train import interrupt
interrupt.GRACE = 0.5
torch.set_num_threads(1)
def stop(trainer, metrics):
    if trainer.ranks.index == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    print("epoch", flush=True)
with process_group(timeout=float(sys.argv[1])):
    trainer = build(callbacks=[stop])
    trainer.fit(*streams(), epochs=3)
"""


@pytest.fixture
def ranks(tmp_path):
    """A function that starts two processes; at the end both are gone."""
    started = []

    def start(timeout):
        port = 20_000 + os.getpid() % 20_000 + len(started)
        for rank in range(2):
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            process = subprocess.Popen(
                [sys.executable, "-c", RANK, str(timeout)],
                env=os.environ | place,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
            started.append(process)
        assert started[0].stdout.readline() == "epoch\n"
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_process_that_hangs_is_noticed_after_the_chosen_time(ranks):
    first, _ = ranks(timeout=5)
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 1
    assert "TrainingError: another process of this run has ended or does not answer" in errors


def test_a_second_signal_ends_a_process_that_waits_for_another(ranks):
    first, _ = ranks(timeout=600)
    time.sleep(1.0)  # into the next epoch, where it waits for the other
    for _ in range(2):
        first.send_signal(signal.SIGINT)
        time.sleep(0.3)
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 130
    assert "ended by a second signal" in errors


def test_a_time_that_makes_no_sense():
    with pytest.raises(ValueError, match="must be positive, got 0"), process_group(timeout=0.0):
        pass
