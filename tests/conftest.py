import pytest
import torch

from .small_run import build, streams


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def double():
    """Exactness is the point: float64 by default inside the test."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """A small run that nothing disturbed: its folder, trainer and result."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("whole")
    trainer = build(folder)
    result = trainer.fit(*streams(), epochs=3)
    return folder, trainer, result
