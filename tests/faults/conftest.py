import shutil
from collections import Counter

import pytest
import torch

from ..small_run import StopAt
from .harness import bad, fit, small


@pytest.fixture
def outcomes(record_property, request):
    """Counts how faults ended; fails the test for an outcome that must not be."""
    counts = Counter()
    yield counts
    what = request.node.originalname.removeprefix("test_").replace("_", " ")
    record_property("faults", [what, dict(counts)])


@pytest.fixture
def must(outcomes):
    """Return the check of all outcomes at the end of a test."""

    def check():
        assert not bad(outcomes), f"of {outcomes.total()}: {bad(outcomes)}"

    return check


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The run that nothing disturbed: its folder and its trainer."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    trainer = small(folder)
    fit(trainer)
    return folder, trainer


@pytest.fixture(scope="session")
def half(tmp_path_factory):
    """A run that was interrupted in its second epoch."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    trainer = small(folder)
    StopAt(trainer, 110)
    with pytest.raises(KeyboardInterrupt):
        fit(trainer)
    assert trainer.epoch == 1
    return folder


@pytest.fixture
def copy(half, tmp_path):
    """Return a function that copies the interrupted run into a folder of its own."""
    torch.set_num_threads(1)

    def make(name):
        return shutil.copytree(half, tmp_path / str(name))

    return make
