import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from atbptt_paper.tasks.copy_data import BLANK, MARKER, copy_symbols, lay_out, read_arrays

DATA = os.environ.get("ADAPTIVE_TBPTT_DATA")


def blocks(x, y):
    """Cut a row at its markers or where the input leaves its blanks; whole sequences only."""
    starts = 1 + np.flatnonzero((x[1:] != BLANK) & (x[:-1] == BLANK))
    return [(x[a:b], y[a:b]) for a, b in itertools.pairwise(starts)]


def test_the_example_in_the_papers_text():
    symbols = {"A": 2, "B": 3, "C": 4, "#": MARKER, "-": BLANK}
    data = np.array([symbols[c] for c in "ACBBAB"], dtype=np.uint8)
    x, y = lay_out(np.array([6]), data, "paper")
    assert x.tolist() == [symbols[c] for c in "ACBBAB#-----"]
    assert y.tolist() == [symbols[c] for c in "------ACBBAB"]


@pytest.mark.parametrize("memory", [(10, 10), (5, 10), (1, 3)])
def test_released_layout(memory):
    data = copy_symbols(400, 6, memory, layout="released", seed=1)
    seen = set()
    for row in range(6):
        for x, y in blocks(data.inputs[:, row], data.targets[:, row]):
            m = len(x) // 2
            assert x[0] == MARKER
            assert (x[1:m] >= 2).all()
            assert (x[1:m] <= 5).all()
            assert (x[m:] == BLANK).all()
            assert (y[:m] == BLANK).all()
            assert (y[m:] == x[:m]).all()
            seen.add(m)
    assert seen == set(range(memory[0], memory[1] + 1))


def test_paper_layout():
    x, y = copy_symbols(200, 1, (4, 4), layout="paper", data_symbols=6, seed=1)
    x, y = x[:, 0], y[:, 0]
    start = int(np.flatnonzero(x == MARKER)[0]) + 4
    for a in range(start, 180, 8):
        assert (x[a : a + 4] >= 2).all()
        assert x[a + 4] == MARKER
        assert (x[a + 5 : a + 8] == BLANK).all()
        assert (y[a : a + 4] == BLANK).all()
        assert (y[a + 4 : a + 8] == x[a : a + 4]).all()


def test_all_data_symbols_come_about_equally_often():
    x = copy_symbols(4000, 32, (10, 10), layout="paper", data_symbols=6).inputs
    counts = np.bincount(x.ravel(), minlength=8)[2:]
    assert counts.min() > 0.95 * counts.max()


def test_rows_start_anywhere_and_depend_on_the_seed_alone():
    many = copy_symbols(100, 64, (10, 10), seed=3)
    phases = [int(np.flatnonzero(many.inputs[:, r] == MARKER)[0]) for r in range(64)]
    assert len(set(phases)) > 15
    few = copy_symbols(100, 8, (10, 10), seed=3)
    assert (many.inputs[:, :8] == few.inputs).all()
    assert (copy_symbols(100, 8, (10, 10), seed=4).inputs != few.inputs).any()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"memory": (0, 3)}, "m must be at least 1"),
        ({"memory": (4, 3)}, "in order"),
        ({"layout": "other"}, "layout must be"),
        ({"steps": 0}, "at least 1"),
        ({"data_symbols": 0}, "data_symbols"),
    ],
)
def test_bad_options(options, says):
    with pytest.raises(ValueError, match=says):
        copy_symbols(**{"steps": 10, "rows": 2, **options})


def test_arrays_are_read_and_a_wrong_file_is_named(tmp_path):
    data = copy_symbols(30, 2)
    names = {f"{s}_{k}": v for s in ("train", "valid", "test") for k, v in data._asdict().items()}
    np.savez(tmp_path / "a.npz", **names)
    assert (read_arrays(tmp_path / "a.npz")["valid"].targets == data.targets).all()
    np.savez(tmp_path / "b.npz", train_inputs=data.inputs)
    for bad in ("b.npz", "missing.npz"):
        with pytest.raises(ValueError, match=rf"cannot read copy arrays from .*{bad}"):
            read_arrays(tmp_path / bad)


@pytest.mark.skipif(DATA is None, reason="ADAPTIVE_TBPTT_DATA is not set")
@pytest.mark.parametrize(("name", "broken_from"), [("fixed", 3423), ("variable", None)])
def test_the_released_arrays_have_our_layout_where_they_are_not_stitched(name, broken_from):
    arrays = read_arrays(Path(str(DATA)) / "copy_authors" / f"{name}.npz")
    x, y = arrays["train"]
    assert x.shape == (4000, 64)
    assert arrays["valid"].inputs.shape == arrays["test"].inputs.shape == (1000, 64)
    assert set(np.unique(x)) == set(range(6))
    if broken_from:
        gaps = [np.diff(np.flatnonzero(x[:broken_from, r] == MARKER)) for r in range(64)]
        assert all((g == 20).all() for g in gaps)
        recalled = y[10:broken_from] != BLANK
        assert (y[10:broken_from][recalled] == x[: broken_from - 10][recalled]).all()
        after = [np.diff(np.flatnonzero(x[broken_from - 20 :, r] == MARKER)) for r in range(64)]
        assert any((g != 20).any() for g in after)
