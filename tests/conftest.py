from collections import Counter

import pytest
import torch

from .faults.harness import report_of
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


def pytest_terminal_summary(terminalreporter):
    """Count the faults that were injected, also where tests ran in several processes."""
    counts = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", []):
                if name == "faults" and report.when == "teardown":
                    what, found = value
                    counts.setdefault(what, Counter()).update(found)
    if counts:
        terminalreporter.section("faults injected")
        for line in report_of(counts):
            terminalreporter.line(line)
