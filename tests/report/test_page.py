"""What the report says of a run folder, before a browser draws it."""

import json
import sys

import numpy as np
import pytest

from adaptive_tbptt.estimate import LagProfile
from adaptive_tbptt.report import read
from adaptive_tbptt.report.charts import style
from adaptive_tbptt.report.curves import Curve, curve_of, truncation_curve
from adaptive_tbptt.report.decay_chart import decay_chart
from adaptive_tbptt.report.page import write_run_report
from adaptive_tbptt.report.read import read_run, read_runs
from adaptive_tbptt.report.tables import differences
from adaptive_tbptt.report.training_charts import bias_chart, loss_chart, truncation_chart

from ..command_line import call

pytest.importorskip("plotly", reason="it needs the extra: pip install 'adaptive-tbptt[report]'")


def write_run(folder, *, epochs=6, delta=0.1, decay=True, lags=21, beta=0.8, checks=()):
    """Write the folder of a run without training: 100 steps and 2 s an epoch."""
    folder.mkdir(parents=True)
    rows = []
    for epoch in range(1, epochs + 1):
        if delta is not None and epoch > 1:
            phi = [float(f"{beta**k * epoch:.4g}") for k in range(lags)]
            bias = 0.08 + 0.01 * (epoch % 3)
            row = {"step": 100 * (epoch - 1), "event": "estimate", "epoch": epoch,
                   "k": 3 + epoch % 5, "beta": beta, "relative_bias": bias}  # fmt: skip
            if decay:
                row |= {"delta": delta, "tau": 10, "decay": {"lags": list(range(lags)), "phi": phi}}
            rows.append(row)
        row = {"step": 100 * epoch, "event": "epoch", "epoch": epoch, "train_loss": 1.0 / epoch,
               "valid_loss": 1.1 / epoch, "k": 10 if delta is None or epoch == 1 else 3 + epoch % 5,
               "updates": 10 * epoch, "seconds": 2.0 * epoch}  # fmt: skip
        rows.append(row)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = "k = 10" if delta is None else f"delta = {delta}"
    (folder / "config.toml").write_text(f'task = "copy"\n{asked}\nlr = 1.0\n')
    if checks:
        lines = [
            dict(zip(("epoch", "k", "measured", "low", "high"), c, strict=True)) for c in checks
        ]
        (folder / "check_bias.jsonl").write_text("".join(json.dumps(c) + "\n" for c in lines))
    return folder


def run_of(folder, **options):
    return read_run(write_run(folder, **options), folder.name)


def change(folder, line, **values):
    """Change a line of the metrics."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    rows[line].update(values)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def data_of(path):
    """Return what the page gives to Plotly."""
    text = path.read_text()
    start = text.index('id="data">') + len('id="data">')
    return json.loads(text[start : text.index("</script>", start)])


def test_nothing_in_the_file_comes_from_elsewhere(tmp_path):
    text = write_run_report([write_run(tmp_path / "run")]).read_text()
    assert "default-src 'none'" in text  # the browser itself refuses the network
    assert "plotly.js v" in text
    for tag in ("<link", "<script src", "<img", "<iframe"):
        assert tag not in text.split('id="data"')[0]


def test_the_default_place_of_a_report(tmp_path, monkeypatch):
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", delta=None)
    monkeypatch.chdir(tmp_path)
    call("report", str(first))
    assert (first / "report.html").exists()
    call("report", str(first), str(second))
    assert (tmp_path / "report.html").exists()
    call("report", str(first), str(second), "--out", str(tmp_path / "new" / "mine.html"))
    assert (tmp_path / "new" / "mine.html").exists()


@pytest.mark.parametrize(
    ("metrics", "says", "code"),  # 2 is wrong use, 1 a damaged file
    [
        (None, "is not a run folder: it has no metrics.jsonl", 2),
        ("", "holds no finished epoch", 2),
        ('{"event": "estimate", "step": 0, "k": 3}\n', "holds no finished epoch", 2),
        ('{"event": "epoch"\n{"event": "epoch"}\n', "line 1 of", 1),
        ("[1]\n", "is not a JSON object", 1),
        ('{"event": "epoch", "epoch": 1}\n', "an epoch has no 'step'", 1),
        ('{"event": "estimate", "step": 1, "k": "3"}\n', "'k' is not a number but '3'", 1),
    ],
)
def test_what_is_no_run_is_said(metrics, says, code, tmp_path):
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_text(metrics)
    assert says in call("report", str(tmp_path), code=code)


def test_a_decay_curve_that_lost_a_value_is_said(tmp_path):
    folder = write_run(tmp_path / "run")
    change(folder, 1, decay={"lags": [0, 1, 2], "phi": [1.0, 0.5]})
    said = call("report", str(folder), code=1)
    assert f"config.toml of {folder} is not what a run writes (IndexError" in said


def test_wrong_folders_and_files_are_said(tmp_path):
    run = write_run(tmp_path / "run")
    assert "there is no such folder" in call("report", str(tmp_path / "none"), code=2)
    assert "is given twice" in call("report", str(run), str(run / "."), code=2)
    unwritable = str(run / "metrics.jsonl" / "report.html")
    assert "cannot write" in call("report", str(run), "--out", unwritable, code=2)
    assert "cannot write" in call("report", str(run), "--out", str(tmp_path), code=2)


def test_without_plotly_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    said = call("report", str(write_run(tmp_path / "run")), code=2)
    assert "pip install 'adaptive-tbptt[report]'" in said


def test_a_line_still_being_written_does_not_count(tmp_path):
    folder = write_run(tmp_path / "run", epochs=3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 400, "event": "ep')
    assert len(read_run(folder, "run").epochs) == 3


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    folders = [write_run(tmp_path / parent / "run") for parent in ("a", "b")]
    assert [run.name for run in read_runs(folders)] == ["a/run", "b/run"]


def test_a_name_cannot_break_the_page(tmp_path):
    text = write_run_report([write_run(tmp_path / "<b>&'\"")]).read_text()
    assert "<b>&" not in text
    assert "&lt;b&gt;&amp;" in text


def test_curves_place_estimates_between_epochs(tmp_path):
    folder = write_run(tmp_path / "run", epochs=4)
    run = read_run(change(folder, 1, step=150), "run")
    curve = curve_of(run, run.estimates, "beta")
    assert curve.epoch.tolist() == [1.5, 2.0, 3.0]
    assert curve.seconds.tolist() == [3.0, 4.0, 6.0]
    k = truncation_curve(run)
    assert k.epoch.tolist() == [0.0, 1.0, 1.5, 2.0, 2.0, 3.0, 3.0, 4.0]
    assert k.y.tolist() == [10, 10, 5, 5, 6, 6, 7, 7]


def test_a_thinned_curve_keeps_ends_and_peaks():
    x = np.arange(100_000.0)
    y = np.random.default_rng(0).normal(size=100_000)
    y[33_333], y[77_777], y[50_000:51_000] = 99.0, -99.0, np.nan
    thin = Curve(x, 2 * x, y).thinned(1000)
    assert len(thin.y) <= 1000
    assert (thin.epoch[0], thin.epoch[-1]) == (0.0, 99_999.0)
    assert (np.nanmax(thin.y), np.nanmin(thin.y)) == (99.0, -99.0)
    assert (thin.seconds == 2 * thin.epoch).all()
    assert (np.diff(thin.epoch) > 0).all()
    whole = Curve(x[:1000], x[:1000], y[:1000])
    assert whole.thinned(1000) is whole


def test_of_many_rows_all_numbers_count_and_few_stay_whole(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", epochs=301)
    every = read_run(folder, "run")
    monkeypatch.setattr(read, "WHOLE", 20)
    thin = read_run(folder, "run")
    assert len(thin.probes.whole) <= 40 < len(every.probes.whole) == 300
    assert thin.probes.last == every.probes.last
    for make in (loss_chart, truncation_chart, bias_chart):
        assert make([thin]) == make([every])
    frames = [decay_chart([run])[1]["runs"][0] for run in (thin, every)]
    assert frames[0][0] == frames[1][0]
    assert frames[0][-1] == frames[1][-1]
    assert len(frames[0]) <= 41


def test_the_fitted_line_has_the_slope_of_beta_and_the_mark_is_at_k(tmp_path):
    run = run_of(tmp_path / "run", beta=0.8)
    chart, frames = decay_chart([run])
    measured, (ends, values), (k, at_k) = frames["runs"][0][-1]["curves"]
    assert measured[0] == list(range(21))
    assert ends == [10, 20]
    assert values[1] / values[0] == pytest.approx(0.8**10, rel=1e-3)
    assert values[0] == pytest.approx(measured[1][10], rel=1e-3)
    assert at_k[0] == measured[1][k[0]]
    assert frames["positions"] == [1, 2, 3, 4, 5]
    assert len(chart.figure["data"]) == 4  # and the other estimates behind


def test_what_a_run_lacks_gets_a_sentence_and_no_chart(tmp_path):
    old = run_of(tmp_path / "old", decay=False)
    fixed = run_of(tmp_path / "fixed", delta=None)
    chart, frames = decay_chart([old, fixed])
    assert chart.figure is frames is None
    assert "kept no decay curves" in chart.says[0]
    assert "K was fixed" in chart.says[1]
    assert old.delta == 0.1  # from the configuration, where estimates do not say
    page = write_run_report([tmp_path / "fixed"])
    assert set(data_of(page)["figures"]) == {"loss", "k"}
    assert page.read_text().count("No chart: ") == 4


def test_repeats_stand_in_for_estimates_where_k_was_fixed(tmp_path):
    folder = write_run(tmp_path / "run", delta=None)
    repeats = {"k": [], "beta": [0.5, 0.7], "relative_bias": [0.2, None]}
    run = read_run(change(folder, 2, repeats=repeats), "run")
    assert curve_of(run, run.estimates, "beta").y.tolist() == pytest.approx([0.6])
    assert curve_of(run, run.estimates, "relative_bias").y.tolist() == [0.2]


def test_measured_biases_are_drawn_with_their_intervals(tmp_path):
    other = (4, 2, 0.8, 0.7, 0.9)  # of a K that the run did not use: it says nothing of the run
    used = [(2, 5, 0.05, 0.04, 0.07), (4, 7, 0.12, 0.1, 0.15)]
    run = run_of(tmp_path / "run", checks=[*used, other])
    measured = bias_chart([run]).figure["data"][-1]
    assert measured["name"] == "measured"
    assert measured["meta"]["epoch"] == [2, 4]
    assert measured["meta"]["time"] == [4, 8]
    assert measured["error_y"]["array"] == pytest.approx([0.02, 0.03])
    page = write_run_report([tmp_path / "run"])
    assert "5 of 5 estimates at most delta" in page.read_text()
    assert "1 of 2 measurements at most delta" in page.read_text()
    names = [trace["name"] for trace in data_of(page)["figures"]["asked"]["data"]]
    assert names == ["estimated bounds", "their median", "measured, with interval", "asked: delta"]


def test_a_bound_that_is_infinite_counts_as_not_kept(tmp_path):
    folder = write_run(tmp_path / "run")
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"relative_bias": 0.1', '"relative_bias": null', 1))
    text = write_run_report([folder]).read_text()
    assert "4 of 5 estimates at most delta" in text
    assert "no bound in 1 of 5 estimates" in text


def test_runs_compare(tmp_path):
    runs = read_runs([write_run(tmp_path / "a"), write_run(tmp_path / "b", delta=None)])
    assert [row[0] for row in differences(runs).rows] == ["delta", "k"]
    for chart in (loss_chart(runs), truncation_chart(runs)):
        assert {trace["meta"]["run"] for trace in chart.figure["data"]} == {0, 1}
        assert len({trace["name"] for trace in chart.figure["data"]}) == len(chart.figure["data"])


def test_losses_below_zero_are_drawn_on_a_linear_axis(tmp_path):
    run = run_of(tmp_path / "run", epochs=50)
    assert loss_chart([run]).figure["layout"]["yaxis"]["type"] == "log"
    run = read_run(change(tmp_path / "run", -1, train_loss=-1.0), "run")
    assert "type" not in loss_chart([run]).figure["layout"]["yaxis"]


def test_runs_are_told_apart_without_colour():
    looks = [(s["line"]["dash"], s["marker"]["symbol"]) for s in map(style, range(6))]
    for part in zip(*looks, strict=True):
        assert len(set(part)) == 6
    assert len({(s["line"]["color"], s["line"]["dash"]) for s in map(style, range(42))}) == 42


def test_the_brief_profile_is_the_mean_at_some_lags():
    norms = np.outer(0.9 ** np.arange(401.0), [1.0, 3.0])
    norms[0] = np.nan
    profile = LagProfile(norms, {}, np.zeros((401, 1)))
    brief = profile.brief(101)
    assert brief["lags"] == list(range(0, 401, 4))
    assert brief["phi"][0] is None
    assert brief["phi"][1:] == pytest.approx(2 * 0.9 ** np.arange(4, 401, 4), rel=1e-3)
