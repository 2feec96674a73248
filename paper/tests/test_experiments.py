"""Runs, tables, figures and findings on tiny budgets."""

import csv
import dataclasses
import json
import math

import pytest
import torch

import adaptive_tbptt as at
from atbptt_paper.experiments.cells import Cell, grid, read_cells, summarise, write_json
from atbptt_paper.experiments.findings import check_findings
from atbptt_paper.experiments.paper import EXPERIMENTS, experiment
from atbptt_paper.experiments.plots import write_figures
from atbptt_paper.experiments.run import make_optimizer, train_run
from atbptt_paper.experiments.runner import run_cells
from atbptt_paper.experiments.tables import rows, write_tables
from atbptt_paper.tasks.copy_task import PRESETS, CopyConfig
from atbptt_paper.tasks.sequence_model import SymbolModel, count_parameters, symbol_loss
from paper_helpers import TINY, fake, table_cells


def test_the_paper_preset_is_the_paper_and_the_release():
    c = PRESETS["paper"]
    assert (c.epochs, c.batch, c.lr, c.weight_decay, c.clip) == (210, 64, 1.0, 1e-5, 1.0)
    assert (c.lags, c.k_init, c.k_min, c.k_max, c.tau, c.burn_in) == (100, 15, 2, 100, 0.8, 20)
    assert (c.hidden, c.layers, c.cell, c.encoder, c.gauge) == (50, 2, "lstm", "linear", "release")
    assert (c.train_steps * c.batch, c.valid_steps * c.batch) == (256_000, 64_000)
    assert c.make_clip() == at.loop.Clip(1.0, per_loss=True)
    assert c.changed(delta=0.1).controller() == at.BiasTolerance(
        delta=0.1,
        k_min=2,
        k_max=100,
        lags=100,
        k_init=15,
        gauge=at.truncate.ReleaseGauge(tau=0.8),
    )
    text = PRESETS["paper-text"]
    assert (text.layout, text.data_symbols, text.encoder) == ("paper", 6, "embedding")


def test_the_model_is_the_releases():
    model = SymbolModel(6)
    lstm = 4 * 50 * (50 + 50 + 2)
    assert count_parameters(model) == (6 * 50 + 50) + 2 * lstm + (50 * 6 + 6)
    for p in model.parameters():
        if p.dim() < 2:
            assert (p == 0).all()
        else:
            bound = (3 / max(p.shape)) ** 0.5
            assert 0.9 * bound < p.abs().max() <= bound
    x = torch.randint(6, (4, 3))
    one_hot = torch.nn.functional.one_hot(x, 6).float()
    by_hand = model.readout(model.recurrent(model.encoder(one_hot))[0])
    torch.testing.assert_close(model(x)[0], by_hand)
    uniform = torch.zeros(4, 3, 6)
    assert symbol_loss(uniform, x).exp().item() == pytest.approx(6.0)


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
@pytest.mark.parametrize("encoder", ["linear", "embedding"])
def test_other_cells_and_encoders(cell, encoder):
    model = SymbolModel(8, 10, 2, cell, encoder)
    assert model(torch.randint(8, (4, 3)).byte())[0].shape == (4, 3, 8)


def test_same_seed_same_model_and_data_whatever_the_global_seed():
    torch.manual_seed(1)
    a = TINY.model().state_dict()
    torch.manual_seed(2)
    b = TINY.changed(k=3).model().state_dict()
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert any(
        not torch.equal(v, a[n]) for n, v in TINY.changed(seed=1).model().state_dict().items()
    )


def test_configurations_survive_toml(tmp_path):
    odd = TINY.changed(k=3, clip=math.inf, data="folder \U0001f600 é/a.npz")
    for config in (TINY.changed(delta=0.3), PRESETS["paper-variable"].changed(k=7), odd):
        path = tmp_path / "config.toml"
        path.write_text(config.to_toml(), encoding="utf-8")
        assert CopyConfig.from_toml(path) == config
    path.write_text("unheard_of = 3")
    with pytest.raises(ValueError, match="unheard_of"):
        CopyConfig.from_toml(path)
    path.write_text("clip = Infinity")
    with pytest.raises(ValueError, match=r"config\.toml cannot be read"):
        CopyConfig.from_toml(path)


def test_every_field_has_a_help_text():
    assert all(f.metadata["help"] for f in dataclasses.fields(CopyConfig))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"delta": 1.5}, "delta must be in"),
        ({"m": 0}, "m must be at least 1"),
        ({"m_min": 9}, "m_min must be in"),
        ({"gauge": "x"}, "one of paper, release"),
        ({"optimizer": "x"}, "one of sgd"),
        ({"step_scale": "x"}, "one of sqrt"),
        ({"layout": "x"}, "one of released, paper"),
        ({"epochs": 0}, "epochs"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"lr": -1.0}, "lr"),
        ({"k": 0}, "k must be at least 1"),
        ({"delta": 0.1, "lags": 500}, "does not fit"),
    ],
)
def test_configurations_that_make_no_sense(values, says):
    with pytest.raises(ValueError, match=says):
        TINY.changed(**values)


def test_exactly_one_of_delta_and_k():
    with pytest.raises(ValueError, match="exactly one"):
        TINY.controller()
    with pytest.raises(ValueError, match="exactly one"):
        CopyConfig(delta=0.1, k=3)
    assert TINY.changed(delta=0.1).changed(k=3).delta is None
    assert TINY.changed(k=3).changed(delta=0.1).k is None
    with pytest.raises(ValueError, match="exactly one"):
        CopyConfig(delta=0.1, recommended=True)
    assert TINY.changed(k=3).changed(recommended=True).k is None
    assert not TINY.changed(recommended=True).changed(k=3).recommended


def test_k_may_be_estimated_first_or_left_to_the_library(tmp_path):
    for first in (False, True):
        config = TINY.changed(delta=0.1, estimate_first=first)
        tbptt = config.make_tbptt(config.model())
        assert next(iter(tbptt.windows(config.streams()["train"]))).first == 0
        assert len(tbptt.history) == first
    config = TINY.changed(recommended=True, losses=10)
    tbptt = config.make_tbptt(config.model())
    assert config.setting == "recommended"
    assert type(tbptt.controller).__name__ == "BestGuess"
    assert (tbptt.losses, tbptt.overlap, tbptt.long_windows) == (10, False, 160)
    assert train_run(config, tmp_path / "own", show=False).fit.epochs == 2


def test_the_start_of_a_long_table():
    e = experiment("ptb-start")
    assert [c.config.k_init for c in e.cells("paper")] == [100] * 5
    cells = [fake(s, 0, 90.0, k=10) for s in e.settings]
    for cell in cells:
        first = cell["setting"] in ("delta=0.1, estimated first", "recommended")
        cell["curves"]["valid_ppl"][0] = 160.0 if first else 750.0
    assert [f.holds for f in check_findings(e, cells)] == [True, True]
    cells[3]["curves"]["valid_ppl"][0] = 700.0
    cells[4]["valid_ppl"] = 95.0
    assert [f.holds for f in check_findings(e, cells)] == [False, False]


@pytest.mark.parametrize("name", ["sgd", "adadelta", "adam"])
def test_optimisers(name):
    config = TINY.changed(optimizer=name, momentum=0.9, weight_decay=0.1, k=2)
    optimizer = make_optimizer(config, config.model())
    assert type(optimizer).__name__.lower() == name
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_a_run_folder_holds_everything_and_resumes_only_itself(tmp_path):
    config = TINY.changed(delta=0.5)
    result = train_run(config, tmp_path / "run", show=False)
    assert (tmp_path / "run" / "config.toml").read_text().startswith('task = "copy"')
    history = result.fit.history
    assert [row["epoch"] for row in history] == [1, 2]
    assert len(history[0]["repeats"]["k"]) == len(history[0]["repeats"]["relative_bias"]) == 3
    trained = result.best
    streams, model = config.streams(), config.model()
    best = tmp_path / "run" / "checkpoints" / "best.safetensors"
    model.load_state_dict(at.train.load_checkpoint(best))
    assert at.evaluate(model, symbol_loss, streams["test"]) == pytest.approx(
        math.log(trained["test_ppl"])
    )
    with pytest.raises(ValueError, match="already holds a run"):
        train_run(config, tmp_path / "run", show=False)
    with pytest.raises(ValueError, match=r"another configuration:\n  lr: 1.0 there, 2.0 here"):
        train_run(config.changed(lr=2.0), tmp_path / "run", resume=True, show=False)
    longer = train_run(config.changed(epochs=3), tmp_path / "run", resume=True, show=False)
    assert longer.fit.epochs == 3
    assert longer.fit.history[:2] == history


def test_repeats_are_the_estimates_of_the_current_parameters(tmp_path):
    # For a fixed K the bias is estimated too, at that K; the seed decides which segments.
    one, two = (
        train_run(TINY.changed(k=3, error_bar_repeats=2), tmp_path / n, show=False) for n in "ab"
    )
    assert one.fit.history[1]["repeats"] == two.fit.history[1]["repeats"]
    assert one.fit.history[1]["repeats"]["k"] == []


def test_jobs_do_not_change_the_numbers_and_finished_cells_are_skipped(tmp_path):
    cells = grid(TINY.changed(epochs=1), [{"k": 2}, {"k": 3}, {"delta": 0.5}], 1)
    said = []
    for jobs in (1, 2):
        folder = tmp_path / str(jobs)
        assert run_cells(cells, folder, tmp_path / f"work{jobs}", jobs=jobs, say=said.append) == []
    results = [read_cells(tmp_path / j) for j in "12"]
    for a, b in zip(*results, strict=True):
        for cell in (a, b):
            del cell["seconds"], cell["origin"], cell["curves"]["seconds"]
        assert a == b
    said.clear()
    run_cells(cells, tmp_path / "1", tmp_path / "work1", say=said.append)
    assert said == ["3 of 3 cells are finished"]
    other = [Cell(cells[0].config.changed(epochs=2), 0)]
    with pytest.raises(ValueError, match="epochs: 1 there, 2 here"):
        run_cells(other, tmp_path / "1", tmp_path / "work1", say=said.append)
    assert not (tmp_path / "work1" / cells[0].name).exists()
    sizes = [p.stat().st_size for p in (tmp_path / "1" / "cells").glob("*.json")]
    assert max(sizes) < 100_000


def test_a_cell_that_fails_is_named_and_the_others_go_on(tmp_path):
    bad = Cell(TINY.changed(k=2, data="nowhere.npz", epochs=1), 0)
    good = Cell(TINY.changed(k=3, epochs=1), 0)
    said = []
    failed = run_cells([bad, good], tmp_path / "r", tmp_path / "w", say=said.append)
    assert failed == ["K-2_init-0"]
    assert (tmp_path / "r" / "cells" / "K-3_init-0.json").exists()
    assert "nowhere.npz" in (tmp_path / "w" / "K-2_init-0.log").read_text()
    assert any("failed, see" in s for s in said)


def test_the_table_has_ours_beside_the_papers(tmp_path):
    e = experiment("copy-fixed")
    table = rows(e, table_cells())
    assert table[0]["setting"] == "K=5"
    assert table[0]["test_ppl_mean"] == pytest.approx(1.651)
    assert table[0]["test_ppl_sd"] == pytest.approx(0.002 / 2**0.5)
    assert table[0]["test_ppl_paper"] == 1.646
    write_tables(e, table_cells(), tmp_path, "atbptt-paper reproduce copy-fixed")
    with (tmp_path / "table.csv").open() as file:
        read = list(csv.DictReader(file))
    assert list(read[0])[:3] == ["setting", "inits", "epochs"]
    assert read[5]["setting"] == "delta=0.9"
    text = (tmp_path / "table.md").read_text()
    assert "**1.021 (0.001)**" in text
    assert "| K=5 | 2 | 100 | 1.651 (0.001) | 1.655 (0.012) |" in text
    assert "of 16 runs: decaying in expectation though unstable (16); beta between 0.8" in text
    assert "commit abc" in text


def test_every_figure_is_drawn(tmp_path):
    files = write_figures(experiment("copy-fixed"), table_cells(), tmp_path)
    assert {f.name for f in files} == {
        "test.png", "valid.png", "best.png", "k.png", "bias.png", "decay.png",
    }  # fmt: skip
    assert all(f.stat().st_size > 5_000 for f in files)


def test_findings_hold_on_curves_like_the_papers():
    found = check_findings(experiment("copy-fixed"), table_cells())
    assert [f.holds for f in found] == [True] * 6
    assert str(found[0]).startswith("yes  K = 5 does not learn: test PPL 1.651")


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({"K=5": 1.05}, "K = 5 does not learn"),
        ({"delta=0.1": 1.08}, "adaptive settings are as good"),
    ],
)
def test_findings_fail_where_they_should(changes, broken):
    failed = [
        f.claim
        for f in check_findings(experiment("copy-fixed"), table_cells(**changes))
        if not f.holds
    ]
    assert len(failed) == 1
    assert failed[0].startswith(broken)


def test_findings_about_k_and_bias_fail_where_they_should():
    cells = table_cells()
    for cell in cells:
        if cell["setting"] == "delta=0.5":
            cell["curves"]["k"] = [30] * 50 + [5] * 50
            cell["repeats"] = [{**r, "relative_bias": [2.0]} for r in cell["repeats"]]
        if cell["setting"] == "K=20":
            cell["repeats"] = [
                {**r, "relative_bias": [0.5 if r["epoch"] < 10 else 0.1]} for r in cell["repeats"]
            ]
        if cell["setting"] == "K=30":
            cell["curves"]["valid_ppl"] = [1.0] * 100
    held = [f.holds for f in check_findings(experiment("copy-fixed"), cells)]
    assert held == [True, False, True, False, False, False]


def test_variable_copy_degrades_gradually():
    e = experiment("copy-variable")
    gradual = table_cells(**{"K=5": 1.46, "K=10": 1.4, "K=15": 1.38, "K=20": 1.36, "K=30": 1.33})
    assert check_findings(e, gradual)[0].holds
    assert not check_findings(e, table_cells())[0].holds


def test_findings_need_a_whole_table():
    with pytest.raises(ValueError, match=r"not finished: delta=0\.1"):
        check_findings(experiment("copy-fixed"), table_cells()[:-2])


def test_findings_need_enough_error_bars():
    cells = [{**c, "repeats": c["repeats"][:4]} for c in table_cells()]
    with pytest.raises(ValueError, match="error bars at more epochs"):
        check_findings(experiment("copy-fixed"), cells)


def test_other_optimisers_are_settings_with_names(tmp_path):
    e = experiment("copy-optimisers")
    cells = e.cells("paper", 1)
    assert [c.name for c in cells] == [f"{n}_init-0" for n in e.variants]
    assert {c.config.k for c in cells} == {10}
    assert [c.config.optimizer for c in cells] == ["sgd", "sgd", "sgd", "adadelta"]
    same = [{**fake(n, 0, 1.04 + 0.001 * i), "repeats": []} for i, n in enumerate(e.variants)]
    assert check_findings(e, same)[0].holds
    assert not check_findings(e, [*same[:3], fake("Adadelta", 0, 1.2)])[0].holds
    for cell in same:
        cell["curves"]["seconds"] = cell["curves"]["data_passes"]
    drawn = {f.name for f in write_figures(e, same, tmp_path)}
    assert drawn == {"test.png", "valid.png", "best.png", "decay.png", "seconds.png"}  # K is fixed
    write_tables(e, same, tmp_path, "command")


def test_gauges_are_compared_with_rare_and_frequent_updates(tmp_path):
    e = experiment("copy-gauges")
    cells = e.cells("paper", 1)
    assert len(cells) == 14
    assert {(c.config.losses_per_k, c.config.losses) for c in cells} == {(1.0, None), (1.0, 10)}
    assert all((c.config.gauge == n) for c, n in zip(cells, ["paper", "release"], strict=False))
    assert all("/" not in c.name for c in cells)
    made = [{**fake(n, 0, 1.04 - 0.001 * i), "repeats": []} for i, n in enumerate(e.variants)]
    for cell in made:
        cell["curves"]["seconds"] = cell["curves"]["data_passes"]
    assert [f.holds for f in check_findings(e, made)] == [True, True]
    worse = [{**c, "test_ppl": 2.0} if c["setting"] == "measured" else c for c in made]
    assert [f.holds for f in check_findings(e, worse)] == [False, True]
    drawn = {f.name for f in write_figures(e, made, tmp_path)}
    assert {"seconds.png", "k_used.png"} <= drawn
    write_tables(e, made, tmp_path, "command")
    assert "| 3, 10, 10 | 1 | 0.6 |" in (tmp_path / "table.md").read_text()  # K, updates, minutes


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(ValueError, match="did you mean copy-fixed"):
        experiment("copy-fixd")
    with pytest.raises(ValueError, match="did you mean quick"):
        EXPERIMENTS["copy-fixed"].cells("quik")


def test_initialisations_are_shared_between_settings():
    cells = EXPERIMENTS["copy-fixed"].cells("paper", 2)
    assert len(cells) == 16
    assert {c.init for c in cells[:8]} == {0}
    assert all(c.config.seed == c.init for c in cells)
    assert len({c.name for c in cells}) == 16


def test_data_is_looked_for_in_a_folder(tmp_path):
    with pytest.raises(ValueError, match=r"fixed\.npz does not exist"):
        EXPERIMENTS["copy-fixed"].cells("paper", data=tmp_path)
    (tmp_path / "fixed.npz").touch()
    cells = EXPERIMENTS["copy-fixed"].cells("paper", data=tmp_path)
    assert cells[0].config.data.endswith("fixed.npz")


def test_summaries_are_json(tmp_path):
    config = TINY.changed(delta=0.5)
    result = train_run(config, tmp_path / "run", show=False)
    write_json(tmp_path / "cells" / "a.json", summarise(Cell(config, 0), result))
    (cell,) = read_cells(tmp_path)
    assert cell["test_ppl"] == pytest.approx(result.best["test_ppl"])
    assert len(cell["curves"]["k"]) == 2
    assert len(cell["repeats"]) == 2
    assert json.dumps(cell, allow_nan=False)
    assert str(tmp_path) not in json.dumps(cell)
