"""The cells of real runs still make their tables, those from before settings were renamed too."""

import csv
from pathlib import Path

import pytest

from atbptt_paper.config import present_names
from atbptt_paper.experiments.cells import Cell, fingerprint, read_cells
from atbptt_paper.experiments.findings import check_findings
from atbptt_paper.experiments.paper import EXPERIMENTS, experiment
from atbptt_paper.experiments.runner import unfinished
from atbptt_paper.experiments.tables import command_of, refuse_foreign, rows, write_tables
from atbptt_paper.tasks.copy_task import CopyConfig

RESULTS = Path(__file__).parents[1] / "results"
TABLES = [name for name in EXPERIMENTS if (RESULTS / name / "cells").is_dir()]


def test_there_are_finished_cells():
    assert sum(len(read_cells(RESULTS / name)) for name in TABLES) >= 85


@pytest.mark.parametrize("name", TABLES)
def test_finished_cells_are_those_that_reproduce_would_run(name):
    """Every fingerprint matches, so nothing is run again and nothing is refused."""
    chosen, found = experiment(name), read_cells(RESULTS / name)
    config = found[0]["config"]
    changes = {key: config[key] for key in ("epochs", "data", "partial") if config.get(key)}
    inits = 1 + max(cell["init"] for cell in found)
    names = {path.stem for path in (RESULTS / name / "cells").iterdir()}
    cells = [c for c in chosen.cells("paper", inits) if c.name in names]
    cells = [Cell(c.config.changed(**changes), c.init) for c in cells]
    assert {c.name for c in cells} == names
    said = []
    assert unfinished(cells, RESULTS / name / "cells", said.append) == []
    assert said == [f"{len(found)} of {len(found)} cells are finished"]


@pytest.mark.parametrize("name", TABLES)
def test_finished_cells_make_the_tables_that_are_kept(name, tmp_path):
    """What `reproduce --tables-only` and `findings` do, but for the figures."""
    chosen, found = experiment(name), read_cells(RESULTS / name)
    refuse_foreign(chosen, found, chosen.presets)
    write_tables(chosen, found, tmp_path, command_of(chosen, "paper", found))
    for file in ("table.md", "table.csv"):
        assert (tmp_path / file).read_bytes() == (RESULTS / name / file).read_bytes()
    if len(rows(chosen, found)) == len(chosen.settings):
        assert check_findings(chosen, found)
    with (tmp_path / "table.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len({cell["setting"] for cell in found})


def test_old_names_are_read_as_what_they_meant(tmp_path):
    new = CopyConfig(k=5, lags=40, losses=10, losses_per_k=1.0)
    old = {n: v for n, v in fingerprint(new).items() if n not in ("lags", "losses", "losses_per_k")}
    old |= {"window": 40, "k2": 10, "losses": 1.0}
    assert present_names(old) == fingerprint(new)
    assert present_names(fingerprint(new)) == fingerprint(new)
    path = tmp_path / "config.toml"
    for text, means in (
        ("window = 40\nlosses = 2.0\nk2 = 10", {"lags": 40, "losses_per_k": 2.0, "losses": 10}),
        ("window = 40\nlosses = 1.0", {"lags": 40, "losses_per_k": 1.0}),
        ("window = 40\nlosses = 2", {"lags": 40, "losses_per_k": 2}),
        ("losses = 0.5", {"losses_per_k": 0.5}),
        ("losses = 5", {"losses": 5}),
        ("lags = 40\nlosses = 5", {"lags": 40, "losses": 5}),
    ):
        path.write_text(f"k = 5\n{text}\n")
        assert CopyConfig.from_toml(path) == CopyConfig(k=5, **means)
    path.write_text("k = 5\nlags = 40\nwindow = 40\n")
    with pytest.raises(ValueError, match="not known: window"):
        CopyConfig.from_toml(path)


def test_losses_per_window_come_in_steps_or_as_a_multiple_of_k():
    config = CopyConfig(k=10, hidden=4, layers=1)
    for changes, expected in (({}, 10), ({"losses_per_k": 0.5}, 5), ({"losses": 3}, 3)):
        changed = config.changed(**changes)
        assert changed.make_tbptt(changed.model()).losses_per_window(10) == expected
    for name in ("losses", "losses_per_k"):
        with pytest.raises(ValueError, match=f"{name} must be"):
            config.changed(**{name: 0})
