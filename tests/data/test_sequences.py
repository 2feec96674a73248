"""Sequences of their own as a stream: what may be given, order, static inputs, padding, errors."""

from itertools import chain

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset

import adaptive_tbptt as at
from adaptive_tbptt.data import map_leaves
from adaptive_tbptt.data import sequences as laid_out
from adaptive_tbptt.data.nest import leaves

LENGTHS = 5, 2, 7, 3, 3


def some(lengths=LENGTHS, static=False):
    """Sequence i holds the numbers 100 i, 100 i + 1, ...; its target is the negative."""
    found = []
    for i, n in enumerate(lengths):
        x = 100.0 * i + torch.arange(n, dtype=torch.float32)[:, None]
        found.append((x, -x[:, 0], *([torch.tensor([float(i), 9.0])] if static else [])))
    return found


class Some(Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return dict(enumerate(some()))[index]  # its end is a KeyError, so only its length tells


def content(stream):
    """The sequences that a stream holds, by row, as lists of numbers."""
    whole = stream.segment(0, stream.length)
    present = torch.ones(stream.length, stream.rows, dtype=torch.bool)
    present = present if whole.present is None else whole.present
    targets = whole.targets.targets if whole.present is not None else whole.targets
    assert torch.equal(targets, -whole.inputs[..., 0])
    found = []
    for row in range(stream.rows):
        values, parts = whole.inputs[present[:, row], row, 0].tolist(), []
        for step, value in enumerate(values):
            if step == 0 or whole.resets[step, row]:
                parts.append([])
            parts[-1].append(value)
        found.append(parts)
    return found


@pytest.mark.parametrize("lengths", [(8, 8, 7), (9, 6, 4, 4, 3)])
def test_a_window_of_sequences_in_a_fixed_order_is_a_view_with_the_same_content(
    lengths, monkeypatch
):
    once = at.SequenceStream.from_sequences(some(lengths), rows=3)
    monkeypatch.setattr(laid_out, "PADDED", 0.0)
    gathered = at.SequenceStream.from_sequences(some(lengths), rows=3)
    a, b = once.segment(0, 2).inputs, once.segment(1, 4).inputs
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    c, d = gathered.segment(0, 2).inputs, gathered.segment(1, 4).inputs
    assert c.untyped_storage().data_ptr() != d.untyped_storage().data_ptr()
    full = min(sum(lengths) // 3, once.length - 1)  # padding begins about here
    pairs = [(0, 2), (full - 1, once.length), (full, once.length), (0, once.length)]
    parts = [(once.segment(*p), gathered.segment(*p)) for p in pairs]
    for seed in range(5):
        seeds = [torch.Generator().manual_seed(seed) for _ in range(2)]
        parts.append((once.random_segment(3, seeds[0]), gathered.random_segment(3, seeds[1])))
    assert any(ours.present is not None for ours, _ in parts)
    for ours, theirs in parts:
        assert (ours.present is None) == (theirs.present is None)
        for x, y in zip(leaves(ours), leaves(theirs), strict=True):
            assert torch.equal(x, y)


def test_static_inputs_are_not_repeated_in_memory():
    stream = at.SequenceStream.from_sequences(some(static=True), rows=2)
    a, b = stream.segment(0, 2).inputs, stream.segment(1, 3).inputs
    assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()


def test_rows_hold_whole_sequences_between_resets():
    stream = at.SequenceStream.from_sequences(some(), rows=2)
    expected = [x[:, 0].tolist() for x, _ in some()]
    found = content(stream)
    assert sorted(chain(*found)) == sorted(expected)
    assert (stream.length, stream.rows) == (10, 2)  # 7 + 3 and 5 + 3 + 2: no padding at all
    assert stream.segment(0, 10).present is None
    assert found == [[expected[2], expected[4]], [expected[0], expected[1], expected[3]]]


def test_padding_is_marked_only_where_there_is_some():
    stream = at.SequenceStream.from_sequences(some((4, 1)), rows=2)
    assert stream.segment(0, 1).present is None
    part = stream.segment(0, 3)
    assert part.present.tolist() == [[True, True], [True, False], [True, False]]
    assert part.between(0, 1).present.all()
    assert part.inputs[:, 1, 0].tolist() == [100.0, 100.0, 100.0]  # the last step repeated
    assert part.resets is None  # one sequence per row
    drawn = stream.random_segment(2, torch.Generator().manual_seed(0))
    assert torch.equal(
        drawn.present, drawn.inputs[..., 0].diff(dim=0, prepend=-drawn.inputs[:1, :, 0]) != 0
    )


def test_datasets_nests_arrays_and_packed_sequences_give_the_same_rows():
    expected = content(at.SequenceStream.from_sequences(some(), rows=3))
    packed = [pack_sequence([p[i] for p in some()], enforce_sorted=False) for i in (0, 1)]
    halves = [
        tuple(pack_sequence([p[i] for p in part], enforce_sorted=False) for i in (0, 1))
        for part in (some()[:2], some()[2:])
    ]
    arrays = [[x.numpy().astype(np.float64), y.numpy().astype(np.float64)] for x, y in some()]
    for given in (Some(), tuple(packed), halves, arrays, iter(some())):
        assert content(at.SequenceStream.from_sequences(given, rows=3)) == expected
    nests = [({"x": x, "more": (x, 2 * x)}, {"y": y}) for x, y in some()]
    part = at.SequenceStream.from_sequences(nests, rows=3).segment(0, 4)
    assert torch.equal(part.inputs["more"][1], 2 * part.inputs["x"])
    assert torch.equal(part.targets["y"], -part.inputs["x"][..., 0])


def test_class_targets_of_numpy_stay_whole_numbers():
    stream = at.SequenceStream.from_sequences([(np.ones((3, 2)), np.arange(3))], rows=1)
    part = stream.read(3)
    assert (part.inputs.dtype, part.targets.dtype) == (torch.float32, torch.int64)


def test_every_epoch_has_an_order_that_depends_on_seed_and_epoch_alone():
    def orders(seed, epochs=6):
        stream = at.SequenceStream.from_sequences(some(), rows=2, shuffle=True, seed=seed)
        found = []
        for _ in range(epochs):
            found.append(content(stream))
            stream.next_epoch()
        return found

    first = orders(0)
    assert first == orders(0)
    assert first != orders(1)
    assert len({str(order) for order in first}) > 3
    assert orders(1)[0] != first[1]
    expected = sorted(x[:, 0].tolist() for x, _ in some())
    assert all(sorted(chain(*order)) == expected for order in first)


def test_a_shuffled_stream_resumes_in_its_order_and_an_evaluation_does_not_change_it():
    def make(seed=3, shuffle=True):
        return at.SequenceStream.from_sequences(some(), rows=2, seed=seed, shuffle=shuffle)

    def loss_fn(out, target):
        return (out[..., 0] - target).square().mean()

    stream = make()
    for _ in range(4):
        stream.next_epoch()
    before = content(stream)
    model = torch.nn.RNN(1, 1)
    for read in (0, 4):
        stream.cursor = read
        at.evaluate(model, loss_fn, stream)
        assert (content(stream), stream.cursor) == (before, read)
    other = make()
    other.load_state_dict(stream.state_dict())
    assert content(other) == before != content(make())
    assert other.cursor == 4
    other.rewind()
    assert content(other) == before
    with pytest.raises(ValueError, match=r"seed 3, this one with 4"):
        make(4).load_state_dict(stream.state_dict())
    with pytest.raises(ValueError, match=r"seed 3, this one with None"):
        make(shuffle=False).load_state_dict(stream.state_dict())


@pytest.mark.parametrize("once", [False, True])
def test_static_inputs_reach_every_step_or_the_first(once):
    data = some(static=True)
    whole = at.SequenceStream.from_sequences(data, rows=2, static_once=once).segment(0, 10)
    x, static = whole.inputs[..., :1], whole.inputs[..., 1:]
    first = x[..., 0] % 100 == 0
    expected = torch.stack([x[..., 0] // 100, torch.full((10, 2), 9.0)], dim=-1)
    assert torch.equal(static, torch.where(first[..., None], expected, 0.0) if once else expected)
    nests = [({"x": x}, y, {"a": s, "id": s[0].long()}) for x, y, s in data]
    named = at.SequenceStream.from_sequences(nests, rows=2, static_once=once).segment(0, 10)
    assert torch.equal(named.inputs["static"]["a"], static)
    assert torch.equal(named.inputs["static"]["id"], static[..., 0].long())
    packed = [pack_sequence([p[i] for p in data], enforce_sorted=False) for i in (0, 1)]
    stacked = torch.stack([s for _, _, s in data])
    again = at.SequenceStream.from_sequences((*packed, stacked), rows=2, static_once=once)
    assert torch.equal(again.segment(0, 10).inputs, whole.inputs)


X, Y = torch.zeros(4, 3), torch.zeros(4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no sequences"),
        ([X], r"a sequence is \(inputs, targets\).*got one Tensor of shape \(4, 3\)"),
        ([(X, Y), (X,)], r"got 1 parts for sequence 1"),
        ([(X, Y), (X, Y, Y)], "sequence 1 has 3 parts, sequence 0 has 2"),
        ([(X, Y), (X, Y[:3])], r"targets of sequence 1 have shape \(3,\): expected 4 steps along"),
        ([(X, {"a": Y, "b": Y[1:]})], r"targets of sequence 0 \(leaf 'b'\) have shape \(3,\)"),
        ([(X[:0], Y[:0])], r"inputs of sequence 0 have shape \(0, 3\): expected at least 1 steps"),
        ([(X, Y), (X[:, :2], Y)], r"shape \(4, 2\) and .*; expected \(time, 3\) .* as in seq"),
        ([(X, Y), (X.double(), Y)], r"type torch.float64; expected .*torch.float32"),
        ([({"x": X}, Y), ({"z": X}, Y)], "have leaves 'z', those of sequence 0 'x'"),
        ([(X, torch.tensor(1.0))], r"have shape \(\): their first axis must be time"),
        ([(X, "a")], "targets of sequence 0: expected a tensor or an array, got str"),
        ([(X, np.array(["a"] * 4))], "expected numbers, got an array of <U1"),
        ([(X, None)], "got NoneType"),
        ([(X[:, 0].long(), Y, X[0])], r"static .* cannot become further features .* as a dict"),
        ([({"static": X}, Y, X[0])], "'static' already"),
        ((pack_sequence([X]), Y), "the targets a Tensor: pack both"),
    ],
)  # fmt: skip
def test_errors_name_the_sequence_the_leaf_and_the_axis(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        at.SequenceStream.from_sequences(given, rows=1)


def test_more_rows_than_sequences_and_a_negative_seed_are_refused():
    with pytest.raises(ValueError, match=r"rows must be in \[1, 5\], as there are 5 sequences"):
        at.SequenceStream.from_sequences(some(), rows=6)
    with pytest.raises(ValueError, match="seed must not be negative"):
        at.SequenceStream.from_sequences(some(), rows=2, shuffle=True, seed=-1)


def test_a_padded_stream_of_your_own_needs_a_boolean_mask_of_its_shape():
    inputs, targets = torch.zeros(3, 6, 2), torch.zeros(3, 6)
    present = torch.arange(6) < torch.tensor([[6], [4], [1]])
    stream = at.SequenceStream(inputs, at.data.Padded(targets, present), batch_first=True)
    assert torch.equal(stream.read(6).present, present.T)
    with pytest.raises(TypeError, match=r"present must be boolean, got torch.float32"):
        at.SequenceStream(inputs, at.data.Padded(targets, present.float()), batch_first=True)
    with pytest.raises(ValueError, match=r"targets \(leaf 'present'\) have"):
        at.SequenceStream(inputs, at.data.Padded(targets, present[:, :5]), batch_first=True)


def test_chunks_of_which_only_some_are_padded_are_joined():
    inputs, targets = torch.zeros(6, 3, 2), torch.zeros(6, 3)
    present = torch.arange(6)[:, None] < torch.tensor([6, 4, 1])
    chunks = [(inputs, targets), (inputs, at.data.Padded(targets, present))]
    for order in (chunks, chunks[::-1]):
        part = at.ChunkStream(order).read(12)
        masks = [torch.ones_like(present), present]
        assert torch.equal(part.present, torch.cat(masks if order is chunks else masks[::-1]))
    model, loss_fn = torch.nn.RNN(2, 1), lambda out, target: (out[..., 0] - target).square().mean()
    tbptt = at.AdaptiveTBPTT(model, loss_fn, 0, losses=4)
    weights = []
    for window in tbptt.windows(at.ChunkStream(chunks)):
        window.backward()
        weights.append(window.weight)
    assert weights == [12, 6 + 5, 4 + 2]


def test_padded_chunks_are_saved_without_classes_of_the_library(tmp_path):
    x, y = torch.randn(9, 2, 3), torch.randn(9, 2)
    present = torch.arange(9)[:, None] < torch.tensor([9, 7])
    chunks = [(x[:3], y[:3]), (x[3:], at.data.Padded(y[3:], present[3:]))]
    stream = at.ChunkStream(chunks)
    stream.read(8)
    torch.save(stream.state_dict(data=True), tmp_path / "stream.pt")
    again = at.ChunkStream(lambda: iter([]))
    again.load_state_dict(torch.load(tmp_path / "stream.pt", weights_only=True))
    found, whole = again.segment(0, 9), stream.segment(0, 9)
    assert again.cursor == 8
    assert torch.equal(found.present, present)
    assert torch.equal(found.targets.targets, whole.targets.targets)


def test_inputs_at_padding_are_finite_targets_need_not_be():
    x, y = torch.randn(6, 2, 3), torch.randn(6, 2)
    present = torch.arange(6)[:, None] < torch.tensor([6, 4])
    y[5, 1] = float("nan")
    at.SequenceStream({"x": x}, at.data.Padded(y, present))
    x[5, 1] = float("nan")
    for batch_first in (False, True):
        data = {"x": x}, at.data.Padded(y, present)
        if batch_first:
            data = map_leaves(lambda leaf: leaf.transpose(0, 1), data)
        with pytest.raises(ValueError, match=r"leaf 'x'\) are NaN or infinite at padded steps"):
            at.SequenceStream(*data, batch_first=batch_first)
