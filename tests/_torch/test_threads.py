"""Commands leave busy cores alone."""

import pytest
import torch

from adaptive_tbptt._torch import threads


@pytest.fixture
def machine(monkeypatch):
    """A machine with so many cores and so many running processes."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    used = []

    def make(cores, load):
        used.clear()
        monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
        monkeypatch.setattr(torch, "set_num_threads", used.append)
        monkeypatch.setattr(threads.os, "cpu_count", lambda: cores)
        monkeypatch.setattr(threads.os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
        return used

    return make


@pytest.mark.parametrize(
    ("cores", "load", "expected"),
    [(2, 0.2, []), (2, 1.1, [1]), (2, 6.0, [1]), (8, 3.0, [5]), (1, 6.0, [])],
)
def test_threads_are_the_idle_cores(machine, cores, load, expected):
    used = machine(cores, load)
    note = threads.use_idle_cores()
    assert used == expected
    assert (note is None) == (not expected)
    if expected:
        assert f"using {expected[0]} of {cores} threads" in note


def test_the_environment_has_priority(machine, monkeypatch):
    used = machine(2, 6.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads.use_idle_cores() is None
    assert used == []


def test_a_system_without_a_load_is_left_alone(machine, monkeypatch):
    used = machine(2, 6.0)
    monkeypatch.delattr(threads.os, "getloadavg")
    assert threads.use_idle_cores() is None
    assert used == []
