"""Where a table says it comes from, and what does not belong into one."""

import math

import numpy as np
import pytest

from atbptt_paper.experiments.cells import fingerprint, read_cells
from atbptt_paper.experiments.findings import check_findings
from atbptt_paper.experiments.paper import experiment
from atbptt_paper.experiments.plots import _repeats, write_figures
from atbptt_paper.experiments.report import run_figure, shown
from atbptt_paper.experiments.tables import command_of, refuse_foreign, rows, write_tables
from atbptt_paper.tasks.copy_task import PRESETS
from paper_helpers import call, fake, table_cells


def made(setting, init, **config):
    values = {"epochs": 210, "data": "fixed.npz", "seed": init, "m": 10, "k": None, "delta": None}
    return {**fake(setting, init, 1.04), "config": {**values, **config}}


def test_the_command_is_that_of_the_cells_not_of_the_options():
    chosen = experiment("copy-fixed")
    cells = [made("K=10", i, k=10) for i in range(3)] + [made("delta=0.1", 0, delta=0.1)]
    command = "atbptt-paper reproduce copy-fixed --preset paper --inits 3 --data FOLDER"
    some = ' --only "K=10" --only "delta=0.1"'
    assert command_of(chosen, "paper", cells) == command + some
    every = [made(s, i, **v) for s, v in chosen.settings.items() for i in range(3)]
    assert command_of(chosen, "paper", every) == command
    short = [made("K=10", 0, k=10, epochs=20, data=None)]
    assert command_of(chosen, "paper", short) == (
        'atbptt-paper reproduce copy-fixed --preset paper --inits 1 --epochs 20 --only "K=10"'
    )
    with pytest.raises(ValueError, match="m: 10 and 5"):
        command_of(chosen, "paper", [*cells, made("K=20", 0, k=20, m=5)])


def test_a_table_of_shorter_runs_says_so(tmp_path):
    chosen = experiment("copy-fixed")
    for epochs, said in ((20, True), (210, False)):
        write_tables(chosen, [{**fake("K=10", 0, 1.04), "epochs": epochs}], tmp_path, "command")
        text = (tmp_path / "table.md").read_text()
        assert ("those of 210 epochs, ours of 20." in text) is said


def test_cells_of_another_experiment_or_preset_are_refused():
    for name, preset in (("copy-fixed", "quick"), ("copy-variable", "paper")):
        base = experiment(name).presets[preset][0].changed(k=10)
        cells = [{**fake("K=10", 0, 1.04), "config": fingerprint(base)}]
        command_of(experiment(name), preset, cells)
        refuse_foreign(experiment(name), cells, ["paper", "quick"])
        with pytest.raises(ValueError, match="is not of copy-fixed with preset paper"):
            command_of(experiment("copy-fixed"), "paper", cells)
    with pytest.raises(ValueError, match=r"is not of copy-fixed with preset (paper|quick)"):
        refuse_foreign(experiment("copy-fixed"), cells, ["paper", "quick"])


def test_a_file_that_is_no_cell_is_named(tmp_path):
    for i, content in enumerate(("{", "[1]", '{"a": 1}')):
        path = tmp_path / str(i) / "cells" / "K-10_init-0.json"
        path.parent.mkdir(parents=True)
        path.write_text(content)
        with pytest.raises(ValueError, match=r"K-10_init-0\.json is not a finished cell"):
            read_cells(tmp_path / str(i))


def test_data_that_are_missing_are_missed_before_any_cell_is_run(tmp_path):
    text = call(
        "reproduce", "ptb-small", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"),
        code=2,
    )  # fmt: skip
    assert "--data is needed" in text
    assert not (tmp_path / "work").exists()


def test_small_deviations_are_not_shown_as_none(tmp_path):
    book = experiment("book-order")
    cells = []
    for init, zero_one in ((0, 0.3826), (1, 0.3832)):
        scores = {
            "valid_nll": -5.0,
            "test_nll": -5.1,
            "test_rmse": 0.0039,
            "test_zero_one": zero_one,
        }
        cells.append({**fake("K=3", init, 1.0), **scores})
    write_tables(book, cells, tmp_path, "command")
    assert "0.3829 (0.0004)" in (tmp_path / "table.md").read_text()


def test_a_perplexity_that_overflowed_is_infinite_in_the_table():
    row = rows(experiment("copy-fixed"), [{**fake("K=5", 0, 1.7), "test_ppl": None}])[0]
    assert row["test_ppl_mean"] == math.inf


def test_one_initialisation_that_overflowed_among_several(tmp_path):
    chosen = experiment("copy-fixed")
    cells = table_cells()
    cells[0].update(test_ppl=None, valid_ppl=None)
    row = next(r for r in rows(chosen, cells) if r["setting"] == cells[0]["setting"])
    assert (row["test_ppl_mean"], row["test_ppl_sd"]) == (math.inf, None)
    assert check_findings(chosen, cells)
    write_figures(chosen, cells, tmp_path)
    assert (tmp_path / "decay.png").exists()


def test_biases_that_are_all_negligible_make_a_figure_too():
    cell = fake("K=30", 0, 1.7)
    for repeat in cell["repeats"]:
        repeat["relative_bias"] = [1e-30 for _ in repeat["relative_bias"]]
    figure = _repeats(experiment("copy-fixed"), [cell], "relative_bias", "bias")
    low, high = figure.axes[0].get_ylim()
    assert 0.005 < low < 0.01
    assert 10 < high < 20
    assert set(figure.axes[0].get_lines()[0].get_ydata()) == {0.01}
    figure.draw_without_rendering()


def test_findings_say_how_many_initialisations_they_rest_on():
    chosen = experiment("copy-fixed")
    assert "(2 initialisations per setting)" in str(check_findings(chosen, table_cells())[0])
    single = [cell for cell in table_cells() if cell["init"] == 0]
    assert "nothing is known of the spread" in str(check_findings(chosen, single)[0])


def test_a_run_whose_perplexity_overflows_is_drawn_and_told():
    row = {
        "data_passes": 1.0,
        "train_loss": 800.0,
        "valid_ppl": None,
        "k": 3,
        "relative_bias": None,
    }
    run_figure(PRESETS["quick"].changed(k=3), [row, {**row, "data_passes": 2.0, "test_ppl": 9.0}])
    assert (shown(None), shown(1.5)) == ("too large to tell", "1.5000")


def test_wrong_use_of_tables_is_a_sentence(tmp_path):
    assert "inits must be at least 1" in call("reproduce", "copy-fixed", "--inits", "-1", code=2)
    assert "reads none" in call("reproduce", "copy-fixed", "--partial", code=2)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "K-10_init-0").touch()  # where the cell's folder would be
    where = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    text = call(
        "reproduce", "copy-fixed", "--preset", "quick", "--only", "K=10", "--inits", "1",
        "--epochs", "1", *where, code=1,
    )  # fmt: skip
    assert "all cells failed" in text
    assert "cannot write to" in text


def test_arrays_with_more_symbols_than_the_model_has_are_refused(tmp_path):
    symbols = np.array([[0, 1], [5, 2]], dtype=np.uint8)
    names = [f"{s}_{part}" for s in ("train", "valid", "test") for part in ("inputs", "targets")]
    np.savez(tmp_path / "a.npz", **dict.fromkeys(names, symbols))
    config = PRESETS["paper"].changed(k=2, data=str(tmp_path / "a.npz"), data_symbols=2)
    with pytest.raises(ValueError, match="needs --data-symbols 4, got 2"):
        config.streams()
