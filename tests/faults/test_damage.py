"""Files damaged at random: a run resumes exactly, or an error names the file."""

import random
import shutil

import pytest

from adaptive_tbptt.train.checkpoint import load

from ..report.test_page import write_run
from .harness import ROUNDS, damaged, resumed, sentence


# Passes once checkpoints have a checksum; before, one flipped bit changes the result.
def test_damaged_checkpoints(copy, whole, outcomes, must):
    dice = random.Random(0)
    for i in range(60 * ROUNDS):
        folder = copy(i)
        path = folder / "checkpoints" / "last.safetensors"
        path.write_bytes(damaged(path.read_bytes(), dice))
        outcomes[resumed(folder, whole, path.name)] += 1
        shutil.rmtree(folder)
    must()


# Passes once checkpoints have a checksum.
def test_damaged_best_weights(copy, outcomes, must):
    dice = random.Random(1)
    path = copy("best") / "checkpoints" / "best.safetensors"
    intact = path.read_bytes()
    for _ in range(60 * ROUNDS):
        path.write_bytes(damaged(intact, dice))
        try:
            load(path)
        except Exception as error:
            outcomes[sentence(error, path.name)] += 1
        else:
            outcomes["silent: loaded"] += 1
    must()


# Passes once a resumed run restores its metrics from the checkpoint.
def test_damaged_metrics_of_a_run_to_resume(copy, whole, outcomes, must):
    dice = random.Random(2)
    for i in range(15 * ROUNDS):
        folder = copy(i)
        path = folder / "metrics.jsonl"
        path.write_bytes(damaged(path.read_bytes(), dice))
        outcomes[resumed(folder, whole, path.name)] += 1
        shutil.rmtree(folder)
    must()


# Passes once a resumed run restores its metrics, and a run folder is never begun anew.
@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/last.safetensors", "starts.jsonl"])
def test_a_missing_file(name, copy, whole, outcomes, must):
    folder = copy("run")
    (folder / name).unlink()
    outcomes[resumed(folder, whole, folder.name)] += 1
    must()
    if "last" in name:  # to begin anew would overwrite the best weights
        assert outcomes["named"] == 1


# Passes once a resumed run restores its metrics from the checkpoint.
def test_metrics_without_their_last_lines(copy, whole, outcomes, must):
    folder = copy("run")
    path = folder / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:1]))
    outcomes[resumed(folder, whole, path.name)] += 1
    must()


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "config.toml", "starts.jsonl", "check_bias.jsonl"]
)
def test_damaged_files_of_a_report(name, tmp_path, outcomes, must):
    pytest.importorskip("plotly", reason="it needs the extra: pip install 'adaptive-tbptt[report]'")
    from adaptive_tbptt.report.page import write_run_report

    dice = random.Random(name)
    folder = write_run(tmp_path / "run", checks=[(2, 5, 0.05, 0.04, 0.07)])
    (folder / "starts.jsonl").write_text('{"time": "2026", "python": "3.12"}\n' * 3)
    path = folder / name
    intact = path.read_bytes()
    for _ in range(20 * ROUNDS):
        path.write_bytes(damaged(intact, dice))
        try:
            write_run_report([folder])
        except Exception as error:
            outcomes[sentence(error, name)] += 1
        else:
            outcomes["page written"] += 1
    must()
