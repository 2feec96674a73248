"""What a run folder may be asked for: to start, to go on, to be looked at while it is written."""

import json
import sys

import numpy as np
import pytest

from adaptive_tbptt.train import read_rows
from atbptt_paper.tasks.copy_data import read_arrays
from atbptt_paper.tasks.corpus import read_corpus
from atbptt_paper.tasks.point_task import PRESETS as POINT
from paper_helpers import ask, call, data_of, train


def test_what_was_refused_can_be_started_anew(tmp_path):
    out = str(tmp_path / "run")
    assert "k_min" in train("--delta", "0.5", "--k-min", "30", "--out", out, code=2)
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "config.toml").write_text('task = "copy"\nk = 3\n')  # stopped at once
    train("--k", "4", "--out", out)
    assert "already holds a run" in train("--k", "4", "--out", out, code=2)


@pytest.mark.parametrize("option", [[], ["--resume"]])
def test_a_run_without_its_last_checkpoint_is_not_overwritten(tmp_path, option):
    out = tmp_path / "run"
    train("--k", "4", "--out", str(out))
    (out / "checkpoints" / "last.safetensors").unlink()
    before = {p: p.read_bytes() for p in out.rglob("*.*") if p.is_file() and p.name != ".lock"}
    text = train("--k", "4", "--out", str(out), *option, code=1 if option else 2)
    assert "holds a run" in text
    assert all(p.read_bytes() == content for p, content in before.items())


@pytest.mark.filterwarnings("default:.*lines that its checkpoint counts")
@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/last.safetensors", "config.toml"])
def test_damage_names_its_file_and_is_not_wrong_use(tmp_path, name):
    out = tmp_path / "run"
    train("--k", "4", "--out", str(out))
    path = out / name
    path.write_bytes(b"\xff{" + path.read_bytes()[2:])
    if name == "metrics.jsonl":
        assert "line 1 of" in ask("report", str(out), code=1)
        text = train("--k", "4", "--out", str(out), "--resume", "--epochs", "3")
        assert "restored 1 from the checkpoint" in text
        assert len(read_rows(path)) == 3
    else:
        text = train("--k", "4", "--out", str(out), "--resume", code=1)
        assert str(path) in text.replace("\n", "")


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right there")
def test_a_name_may_hold_anything_and_figures_replace_links(tmp_path):
    out, target = tmp_path / "run", tmp_path / "precious"
    target.write_text("kept")
    out.mkdir()
    for name in ("run.png", "decay.png"):
        (out / name).symlink_to(target)
    train("--k", "4", "--out", str(out), "--name", r"$\bad{$")
    assert target.read_text() == "kept"
    for name in ("run.png", "decay.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_a_check_is_shown_though_it_cannot_be_kept(tmp_path):
    out = tmp_path / "run"
    train("--k", "4", "--out", str(out))
    (out / "check_bias.jsonl").mkdir()
    text = ask("check-bias", str(out), "--delta", "0.5", "--segments", "6", code=1)
    assert "delta=0.5 is" in text
    assert "the check above is not in" in text


def test_a_run_cannot_go_back_to_fewer_epochs(tmp_path):
    out = tmp_path / "run"
    train("--k", "4", "--out", str(out))
    before = (out / "config.toml").read_text()
    text = train("--k", "4", "--out", str(out), "--resume", "--epochs", "1", code=2)
    assert "holds 2 epochs already, more than 1" in text
    assert (out / "config.toml").read_text() == before


def test_a_run_from_before_the_settings_were_renamed_goes_on(tmp_path):
    out = tmp_path / "run"
    train("--k", "4", "--losses", "3", "--out", str(out))
    path = out / "config.toml"
    old = path.read_text().replace("lags = ", "window = ").replace("\nlosses = 3", "\nk2 = 3")
    path.write_text(old.replace("losses_per_k = 1.0", "losses = 1.0"))
    assert {"window = 20", "losses = 1.0", "k2 = 3"} <= set(path.read_text().splitlines())
    train("--k", "4", "--losses", "3", "--out", str(out), "--resume", "--epochs", "3")
    assert "training windows of 3 losses" in ask(
        "check-bias", str(out), "--delta", "0.5", "--segments", "6"
    )


def test_a_line_that_is_still_being_written_does_not_count(tmp_path):
    out = tmp_path / "run"
    train("--k", "4", "--out", str(out))
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"event": "epo')
    assert len(read_rows(out / "metrics.jsonl")) == 2
    ask("check-bias", str(out), "--delta", "0.5", "--segments", "6")
    with (out / "check_bias.jsonl").open("a") as file:
        file.write(json.dumps({"x": 1}) + "\n")
    ask("report", str(out))


def test_a_diagnosis_is_shown_though_its_figure_cannot_be(tmp_path):
    out = tmp_path / "run"
    train("--k", "4", "--out", str(out), "--k-min", "3")
    given = ["--lags", "2", "--segments", "8", "--out", str(tmp_path / "x.foo")]
    text = ask("diagnose", str(out), *given, code=2)
    assert "your loop as it is" in text
    assert "'foo' is not supported" in text


def test_settings_that_cannot_be_used_name_their_file(tmp_path):
    (tmp_path / "config.toml").write_text('task = "copy"\nk = "ten"\n')
    assert "config.toml cannot be used" in ask("diagnose", str(tmp_path), code=2)


@pytest.mark.parametrize("config", [None, "lr = 1.0\n", 'task = "other"\n', "task = [1]\n"])
def test_a_folder_of_somebody_else_is_left_to_others(config, tmp_path):
    if config is not None:
        (tmp_path / "config.toml").write_text(config)
    text = ask("diagnose", str(tmp_path), code=2)
    assert "no installed package can open the run folder" in text
    assert "asked adaptive-tbptt-paper" in text


@pytest.mark.parametrize(
    ("option", "value"), [("time_scale", -1.0), ("train_sequences", 0), ("lr_decay", -1.0)]
)
def test_values_that_make_no_sense(option, value):
    with pytest.raises(ValueError, match=option):
        POINT["quick"].changed(**{option: value})


def test_arrays_that_are_cut_off_or_negative(tmp_path):
    path = tmp_path / "a.npz"
    names = [
        f"{split}_{part}" for split in ("train", "valid", "test") for part in ("inputs", "targets")
    ]
    np.savez(path, **dict.fromkeys(names, np.array([[0], [-1]])))
    with pytest.raises(ValueError, match="a symbol is negative"):
        read_arrays(path)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ValueError, match="cannot read copy arrays"):
        read_arrays(path)


def test_text_that_is_not_utf8_names_its_file_and_leaves_nothing(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_bytes(b"caf\xe9\n" if split == "valid" else b"a b\n")
    with pytest.raises(ValueError, match=r"valid\.txt is not UTF-8"):
        read_corpus(tmp_path, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_empty_split_is_named(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("" if split == "valid" else "a b c\n" * 400)
    text = call(
        "train", "language", "--preset", "ptb-small", "--dataset", "text", "--data", str(tmp_path),
        "--k", "4", "--out", str(tmp_path / "run"), code=2,
    )  # fmt: skip
    assert "the valid split has 0 tokens" in text


def test_a_surprise_is_a_sentence_too(monkeypatch):
    def fails(*args):
        raise KeyError("x")

    monkeypatch.setattr("atbptt_paper.experiments.cells.read_cells", fails)
    assert "error: KeyError, --debug shows where: 'x'" in call("findings", "copy-fixed", code=1)


def test_a_trained_run_has_all_that_the_report_draws(tmp_path):
    go = pytest.importorskip("plotly.graph_objects", reason="needs 'adaptive-tbptt[report]'")
    out = tmp_path / "run"
    train("--delta", "0.5", "--out", str(out))
    train("--delta", "0.5", "--out", str(out), "--resume", "--epochs", "4")
    assert str(out / "report.html") in ask("report", str(out))
    data = data_of(out / "report.html")
    assert set(data["figures"]) == {"loss", "k", "beta", "bias", "asked", "decay"}
    for figure in data["figures"].values():
        go.Figure(figure)  # refuses an attribute that Plotly does not have
        assert all(any(y is not None for y in trace["y"]) for trace in figure["data"])
        for axis in ("xaxis", "yaxis"):
            assert "title" in figure["layout"][axis]
    assert len(data["frames"]["positions"]) == 3  # an estimate before each epoch but the first
    starts = read_rows(out / "starts.jsonl")
    assert len(starts) == 2
    assert {"time", "machine", "python", "torch", "adaptive-tbptt"} <= starts[0].keys()
    probes = [r for r in read_rows(out / "metrics.jsonl") if r["event"] == "estimate"]
    assert probes[0]["decay"]["lags"] == list(range(21))
    assert '<th scope="row">starts</th><td>2</td>' in (out / "report.html").read_text()
