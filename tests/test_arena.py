"""The arena: every method trains, estimators are unbiased, and regret is what it says."""

import json
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks.arena import cell, engine, methods, pairs, regret, runner, tasks
from torch import nn


def tiny():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(5, (300, 4), generator=generator)
    y = torch.roll(x, 3, 0)
    return (x, y), (x[:60], y[:60])


@pytest.fixture(autouse=True)
def _restored():
    """A heat sets the threads and the small numbers of its process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


@pytest.fixture
def task(monkeypatch):
    made = tasks.Task(
        "tiny",
        tiny,
        lambda: tasks.Net(5, 0, 8, 5, nn.GRU),
        tasks.cross_entropy,
        False,
        0.01,
        1.0,
        120,
    )
    monkeypatch.setitem(cell.TASKS, "tiny", made)
    return made


@pytest.mark.parametrize("method", methods.METHODS)
def test_every_method_trains_and_reads_the_data_in_order(task, method):
    found = cell.run("tiny", method, 0.01, seed=0)
    times = [seconds for seconds, _, _ in found["curve"]]
    assert times == sorted(times)
    assert found["updates"] > 0
    assert all(math.isfinite(loss) for _, _, loss in found["curve"])
    assert found["curve"][-1][2] < found["curve"][0][2]


def gradient_of(model, loss):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def test_levels_add_up_to_the_window_and_factors_weigh_them(task):
    model = task.model(0).double()
    carried = engine.Carried(40)
    with torch.no_grad():
        for step in (100, 110, 120):
            carried.put(step, model.core(task.train[0][:step], None)[1])
    found = engine.run_levels(task, model, carried, 120, 10, (10, 20))
    plan = engine.Plan(10, (10, 20), (2.0, 3.0))
    weighed = gradient_of(model, engine.run_window(task, model, carried, 120, plan))
    plain = gradient_of(
        model, engine.run_window(task, model, carried, 120, engine.Plan(10, (10, 20)))
    )

    def total(*weights):
        parts = zip(weights, found, strict=True)
        return sum(
            w
            * torch.cat(
                [
                    (torch.zeros_like(p) if g is None else g).flatten()
                    for p, g in zip(model.parameters(), level, strict=True)
                ]
            )
            for w, level in parts
        )

    np.testing.assert_allclose(plain, total(1, 1, 1), atol=1e-12)
    np.testing.assert_allclose(weighed, total(1, 2, 6), atol=1e-12)


def test_a_telescope_weighs_every_level_by_the_chance_that_it_is_run(task):
    model, method = task.model(0), methods.Telescope(0, 10, (1, 2))
    optimizer = task.optimizer(model, 0.01)
    carried, first = engine.Carried(20), 0
    for _ in range(8):
        first = method.update(task, model, optimizer, carried, first, 0.0)
    nodes = method._nodes
    assert method.chances[nodes[0]] == 1.0
    mean = np.zeros(3)
    tails = [method.chances[n] for n in nodes] + [0.0]
    for i, node in enumerate(nodes):
        weights = np.zeros(3)
        weights[: node + 1] = method._weights(node)
        mean += (tails[i] - tails[i + 1]) * weights
    np.testing.assert_allclose(mean, 1.0)


def curve(*values, seconds=10.0):
    return [[i * seconds, i, v] for i, v in enumerate(values)]


def test_time_to_a_target_is_interpolated_and_may_be_never():
    assert regret.time_to(curve(3.0, 2.0, 1.0, 0.0), 1.5) == pytest.approx(15.0)
    assert regret.time_to(curve(3.0, 2.0, 1.0, 1.0, 2.0, 2.0), 1.5) == pytest.approx(15.0)
    assert regret.time_to(curve(3.0, 2.0, math.nan), 1.5) == math.inf


def test_one_lucky_look_does_not_count():
    assert regret.time_to(curve(3.0, 2.0, 1.0, 2.0, 2.0), 1.5) == math.inf
    assert regret.loss_at(curve(3.0, 2.0, 1.0, 2.0, 2.0), 40.0) == 2.0


def test_regret_is_relative_to_the_best_fixed_setting_on_the_same_seed():
    cells = {
        "t": {
            "detach 10": {0: curve(4.0, 3.0, 2.0, 1.0, 0.5), 1: curve(4.0, 3.0, 2.0, 1.0, 0.5)},
            "detach 35": {0: curve(4.0, 3.5, 3.0, 2.5, 2.2), 1: curve(4.0, 3.5, 3.0, 2.0, 1.9)},
            "ours": {0: curve(4.0, 2.0, 1.0, 0.5, 0.2), 1: curve(4.0, 4.0, 4.0, 4.0, 4.0)},
        }
    }
    found = regret.regrets(cells)["t"]
    assert found["detach 10"] == {0: 1.0, 1: 1.0}
    assert found["detach 35"] == {0: math.inf, 1: 1.5}
    assert found["ours"] == {0: 0.5, 1: math.inf}


def test_the_sign_test_counts_pairs():
    assert regret.paired_test([1, 1, 1, 1, 1], [2, 2, 2, 2, math.inf]) == pytest.approx(2 / 32)
    assert regret.paired_test([1, 2], [1, 2]) == 1.0


def test_a_heat_can_be_sent_to_a_process(tmp_path, monkeypatch):
    """Pickled by name: what a process runs must be importable there."""
    job = runner.Job("mackey-glass", "detach 10", 0.004, 100)
    assert pickle.loads(pickle.dumps(runner.finish)).__module__ == "benchmarks.arena.runner"
    curves = [{"curve": [[0.0, 0, v]], "updates": 0} for v in (1.0, 2.0)]
    monkeypatch.setattr(runner, "run_heat", lambda *heat, **limits: curves)
    other = job._replace(method="detach 35")
    assert runner.heats([job, other, job._replace(seed=0)])[0] == [job, other]
    assert "2.0000" in runner.finish([job, other], tmp_path, "abc")
    kept = [json.loads((tmp_path / "cells" / j.name).read_text()) for j in (job, other)]
    assert kept[0]["heat"] == kept[1]["heat"]
    assert json.loads((tmp_path / "cells" / job.name).read_text())["commit"] == "abc"


def test_only_the_newest_heat_of_a_task_and_a_seed_counts(tmp_path):
    (tmp_path / "cells").mkdir()
    for i, (method, heat) in enumerate([("a", "t, seed 0, 01"), ("b", "t, seed 0, 02")]):
        held = {"task": "t", "method": method, "seed": 0, "curve": [], "heat": heat}
        (tmp_path / "cells" / f"{i}.json").write_text(json.dumps(held))
    assert list(regret.read_cells(tmp_path, 100)["t"]) == ["b"]


def test_the_cells_of_a_heat_train_in_turn(task, monkeypatch):
    turns = []
    train = cell.Cell.train

    def noted(self, due, since, until):
        turns.append(self.method)
        train(self, due, since, until)

    monkeypatch.setattr(cell.Cell, "train", noted)
    found = cell.run_heat("tiny", [("detach 10", 0.01), ("context 10", 0.02)], seed=0)
    assert turns == ["detach 10", "context 10"] * cell.LOOKS
    assert [c["rate"] for c in found] == [0.01, 0.02]
    assert all(c["updates"] > 30 for c in found)


def test_a_run_ends_at_a_loss_or_goes_on_beyond_the_budget(task):
    whole = cell.run("tiny", "detach 10", 0.01, seed=0)
    until = whole["curve"][5][2]
    short = cell.run("tiny", "detach 10", 0.01, seed=0, until=until)
    assert short["curve"][-1][2] <= until
    assert all(loss > until for _, _, loss in short["curve"][:-1])
    longer = cell.run("tiny", "detach 10", 0.01, seed=0, share=2.0)
    assert len(longer["curve"]) == 61


def test_a_cell_gets_the_time_that_the_clock_needs(task, monkeypatch):
    """However slow the machine is, a detach loop makes the task's updates."""
    now, real = [0.0], cell.Cell.update

    def slow(self, done):
        now[0] += {"detach 35": 2.0, "context 10": 5.0}[self.method]
        real(self, done)

    monkeypatch.setattr(cell.Cell, "update", slow)
    monkeypatch.setattr(cell.time, "process_time", lambda: now[0])
    same, other = cell.run_heat("tiny", [("detach 35", 0.01), ("context 10", 0.01)], seed=0)
    assert (same["updates"], other["updates"]) == (task.updates, task.updates * 2 / 5)
    half = cell.run("tiny", "detach 35", 0.01, seed=0, share=0.5)
    assert half["updates"] == task.updates / 2


def test_the_table_counts_pairs_and_puts_the_smallest_worst_regret_first(tmp_path):
    cells = {
        "copy": {
            "detach 10": {0: curve(4.0, 3.0, 2.0, 1.0, 0.5), 1: curve(4.0, 3.0, 2.0, 1.0, 0.5)},
            "detach 35": {0: curve(4.0, 3.5, 3.0, 2.5, 2.2), 1: curve(4.0, 3.5, 3.0, 2.5, 2.0)},
            "ours": {0: curve(4.0, 2.0, 1.0, 0.5, 0.2), 1: curve(4.0, 2.0, 1.0, 0.5, 0.2)},
        }
    }
    rows = regret.summary(cells, "ours")
    assert [row["method"] for row in rows] == ["ours", "detach 10", "detach 35"]
    assert (rows[0]["median"], rows[0]["worst"]) == (0.5, 0.5)
    assert (rows[2]["faster"], rows[2]["pairs"], rows[2]["p"]) == (2, 2, 0.5)
    assert rows[2]["worst"] == math.inf
    (tmp_path / "cells").mkdir()
    for method, curves in cells["copy"].items():
        for seed, found in curves.items():
            held = {"task": "copy", "method": method, "seed": seed, "curve": found}
            (tmp_path / "cells" / f"{method}-{seed}.json").write_text(json.dumps(held))
    for method, values in {"ours": (4.0, 3.0, 2.0, 2.0), "detach 10": (4.0, 2.0, 1.0)}.items():
        held = {"task": "copy", "method": method, "seed": 3, "curve": curve(*values)}
        (tmp_path / "cells" / f"{method}-3.json").write_text(json.dumps(held))
    regret.write_table(tmp_path, 100, seeds=(0, 1), fresh=(3,))
    assert (
        "| copy | detach 10 | 3 | 10.0 s | 20.0 s | 2.00 |" in (tmp_path / "fresh.md").read_text()
    )
    table = (tmp_path / "table.md").read_text()
    assert "| **ours** | 0.50 | 0.50 | 0.50 |  |" in table
    assert "| detach 35 | never | never | never | 2 of 2 (p = 0.5) |" in table
    assert {p.name for p in tmp_path.glob("*.png")} == {"curves.png", "regret.png"}


def test_what_lies_beyond_the_budget_or_below_solved_does_not_count():
    task = replace(tasks.TASKS["copy"], solved=0.5)
    beyond = curve(3.0, 1.0, *[0.1] * cell.LOOKS, seconds=1.0)
    found = regret.counted(beyond, task)
    assert found[:3] == [[0, 0, 3.0], [1, 1, 1.0], [2, 2, 0.5]]
    assert len(beyond) == len(found) + 1 == cell.LOOKS + 2


def test_pairs_are_compared_seed_by_seed(tmp_path):
    (tmp_path / "cells").mkdir()
    curves = {"ours": {0: curve(4, 2, 1, 0, 0), 1: curve(4, 3, 2, 1, 0)}, "other": {}}
    curves["other"] = {0: curve(4, 3, 2, 1, 0), 1: curve(4, 2, 1, 0, 0)}
    for method, seeds in curves.items():
        for seed, found in seeds.items():
            held = {"task": "t", "method": method, "seed": seed, "curve": found}
            (tmp_path / "cells" / f"{method}-{seed}.json").write_text(json.dumps(held))
    text, _, _, _, first, second = pairs.compare(tmp_path, "t", "ours", "other", 2.0, 100)
    assert (first, second) == ("| 0 | 10.00 | 20.00 | 0.50 |", "| 1 | 20.00 | 10.00 | 2.00 |")
    assert "over 2 seeds that both reach it on: 1.00 [" in text
