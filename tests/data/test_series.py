"""One long series cut into rows."""

import numpy as np
import pytest
import torch

import adaptive_tbptt as at

from_series = at.SequenceStream.from_series


class Table:
    """What the library needs of pandas: its values."""

    def __init__(self, values):
        self.values = values

    def to_numpy(self):
        return self.values


@pytest.mark.parametrize(
    ("steps", "rows", "horizon"), [(9, 2, 1), (23, 4, 3), (11, 4, 1), (7, 1, 2)]
)
def test_every_step_with_a_target_appears_once_and_rows_follow_in_time(steps, rows, horizon):
    stream = from_series(np.arange(steps), rows=rows, horizon=horizon)
    whole = stream.segment(0, stream.length)
    present, targets = torch.ones(stream.length, rows, dtype=torch.bool), whole.targets
    if whole.present is not None:
        targets, present = targets
    assert int((~present).sum()) < rows
    inputs, ahead = whole.inputs[..., 0].T[present.T], targets[..., 0].T[present.T]
    assert inputs.tolist() == list(range(steps - horizon))
    assert torch.equal(ahead, inputs + horizon)
    assert whole.resets is None


def test_arrays_tables_and_tensors_give_the_same_stream():
    values = np.random.default_rng(0).normal(size=(20, 3))
    expected = from_series(torch.tensor(values, dtype=torch.float32), rows=2).read(9)
    for given in (values, Table(values), values.astype(np.float32)):
        part = from_series(given, rows=2).read(9)
        assert torch.equal(part.inputs, expected.inputs)
        assert torch.equal(part.targets, expected.targets)


def test_tables_and_columns_of_pandas():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": [1.0, 2.0, 3.0], "b": [4, 5, 6], "day": ["x", "y", "z"]})
    assert from_series(table[["a", "b"]]).read(9).inputs[:, 0].tolist() == [[1, 4], [2, 5]]
    assert from_series(table["b"]).read(9).targets[:, 0].tolist() == [[5], [6]]
    with pytest.raises(TypeError, match="series: expected numbers, got an array of object"):
        from_series(table)
    pair = (table[["a"]], table["b"])
    assert at.SequenceStream.from_sequences([pair], rows=1).read(9).targets.tolist() == [
        [4],
        [5],
        [6],
    ]


def test_targets_of_their_own_are_paired_step_by_step_or_ahead():
    x, y = np.arange(6.0), 10.0 * np.arange(6)
    assert from_series(x, y).read(9).targets[:, 0, 0].tolist() == [0, 10, 20, 30, 40, 50]
    assert from_series(x, y, horizon=2).read(9).targets[:, 0, 0].tolist() == [20, 30, 40, 50]
    classes = from_series(x, np.arange(6)).read(9).targets
    assert (classes.shape, classes.dtype) == ((6, 1), torch.int64)
    tokens = from_series(torch.arange(9), rows=2).read(4)
    assert (tokens.inputs.shape, tokens.inputs.dtype) == ((4, 2), torch.int64)
    assert from_series(np.arange(9)).read(1).inputs.dtype == torch.float32


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (np.zeros((4, 2, 3)), {}, r"series have shape \(4, 2, 3\): expected \(time,\) or"),
        (np.array(["2001-01-01"]), {}, "series: expected numbers, got an array of <U10; leave out"),
        (np.array([1.0, np.nan]), {}, "values of the series are NaN or infinite at step 1"),
        (np.zeros(5), {"targets": np.zeros(4)}, r"targets have shape \(4, 1\): expected 5 steps"),
        (np.zeros(5), {"horizon": 0}, "horizon must be at least 1"),
        (np.zeros(5), {"targets": np.zeros(5), "horizon": -1}, "horizon must be at least 0"),
        (np.zeros(5), {"horizon": 5}, r"rows must be in \[1, 0\] .* horizon of 5"),
        (np.zeros(5), {"rows": 5}, r"rows must be in \[1, 4\]"),
        ([1.0, 2.0], {}, "series: expected a tensor or an array, got list"),
    ],
)  # fmt: skip
def test_errors_say_what_was_expected(given, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        from_series(given, **options)
