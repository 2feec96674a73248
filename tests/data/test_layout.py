"""Which sequence goes to which row: nothing is lost, little is padded."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_tbptt.data.layout import Layout, pack_rows


@st.composite
def cases(draw, most=30):
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=most))
    rows = draw(st.integers(1, len(lengths)))
    order = draw(st.permutations(range(len(lengths))))
    return lengths, rows, order


@given(cases())
@settings(deadline=None)
def test_every_step_appears_once_and_every_sequence_is_contiguous(case):
    lengths, rows, _ = case
    layout = Layout.of(*case)
    step, sequence, begins = layout.step.numpy(), layout.sequence.numpy(), layout.begins.numpy()
    present = np.ones_like(begins) if layout.present is None else layout.present.numpy()
    assert sorted(step[present]) == list(range(sum(lengths)))
    starts = np.cumsum([0, *lengths])
    for i, length in enumerate(lengths):
        (times, columns) = np.nonzero((sequence == i) & present)
        assert len(set(columns)) == 1
        assert list(np.diff(times)) == [1] * (length - 1)
        assert list(step[times, columns]) == list(range(starts[i], starts[i + 1]))
        assert list(begins[times, columns]) == [True] + [False] * (length - 1)
    assert not begins[~present].any()
    # Padding comes last in a row, and repeats its last step.
    assert (np.diff(present.astype(int), axis=0) <= 0).all()
    for row in range(rows):
        own = step[:, row][present[:, row]]
        assert (step[len(own) :, row] == own[-1]).all()


@given(cases())
@settings(deadline=None)
def test_padding_is_bounded_and_the_length_does_not_depend_on_the_order(case):
    lengths, rows, order = case
    packed = pack_rows(lengths, rows, order)
    totals = [sum(lengths[i] for i in row) for row in packed]
    longest = packed[int(np.argmax(totals))]
    assert max(totals) - min(totals) <= min(lengths[i] for i in longest)
    again = pack_rows(lengths, rows, range(len(lengths)))
    assert sorted(totals) == sorted(sum(lengths[i] for i in row) for row in again)
    place = {i: p for p, i in enumerate(order)}
    assert all(row == sorted(row, key=place.get) for row in packed)


@given(cases(most=6))
@settings(deadline=None, max_examples=50)
def test_the_longest_row_is_within_a_third_of_the_best_that_search_finds(case):
    lengths, rows, _ = case
    longest = max(sum(lengths[i] for i in row) for row in pack_rows(*case))
    best = min(
        max(np.bincount(choice, weights=lengths, minlength=rows))
        for choice in product(range(rows), repeat=len(lengths))
    )
    assert best <= longest <= (4 / 3 - 1 / (3 * rows)) * best + 1e-9
