"""Rooms of the library: no module shadowed by a function of its name."""

import importlib
import pkgutil
from types import ModuleType

import pytest

import adaptive_tbptt

PACKAGES = [
    "adaptive_tbptt",
    *(
        info.name
        for info in pkgutil.walk_packages(adaptive_tbptt.__path__, "adaptive_tbptt.")
        if info.ispkg
    ),
]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_is_shadowed(package):
    room = importlib.import_module(package)
    modules = [info.name for info in pkgutil.iter_modules(room.__path__)]
    for name in modules:
        if name == "__main__":
            continue
        try:
            importlib.import_module(f"{package}.{name}")
        except ImportError:  # of what is optional: nothing is shadowed then
            continue
        assert isinstance(getattr(room, name), ModuleType), f"{package}.{name}"


def test_every_room_is_looked_at():
    assert len(PACKAGES) >= 10
    assert "adaptive_tbptt.measure" in PACKAGES


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_room_offers_is_there_and_sorted(package):
    room = importlib.import_module(package)
    names = getattr(room, "__all__", [])
    assert list(names) == sorted(set(names))
    for name in names:
        assert hasattr(room, name)
