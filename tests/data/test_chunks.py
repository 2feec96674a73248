import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import adaptive_tbptt as at

from ..oracle import Scripted

PAPER = at.truncate.PaperGauge()


def pieces(lengths=(7, 5, 9, 1, 30, 8), rows=3, resets=False):
    x, y = torch.randn(sum(lengths), rows, 2), torch.randn(sum(lengths), rows, 4)
    r = torch.rand(sum(lengths), rows) < 0.1
    parts = zip(*(t.split(lengths) for t in ((x, y, r) if resets else (x, y))), strict=True)
    return (x, y, r) if resets else (x, y), list(parts)


def train(model, stream, **options):
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, Scripted([3, 11, 2]), burn_in=1, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for window in tbptt.windows(stream):
            window.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("as_function", [False, True])
def test_chunks_train_as_the_whole_does(resets, as_function):
    whole, parts = pieces(resets=resets)
    model, twin = nn.GRU(2, 4), nn.GRU(2, 4)
    twin.load_state_dict(model.state_dict())
    source = (lambda: iter(parts)) if as_function else parts
    ours = train(model, at.ChunkStream(source), estimate_every=20)
    theirs = train(twin, at.SequenceStream(*whole), estimate_every=20)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_only_what_is_needed_is_kept():
    def endless():
        for _ in range(400):
            yield torch.randn(10, 2, 2), torch.randn(10, 2, 4)

    stream = at.ChunkStream(endless)
    control = at.BiasTolerance(delta=0.5, k_max=20, lags=30, gauge=PAPER)
    tbptt = at.AdaptiveTBPTT(nn.GRU(2, 4), F.mse_loss, control, estimate_every=200, burn_in=5)
    held = []
    for window in tbptt.windows(stream):
        window.backward()
        held.append(sum(part.steps for part in stream._held))
    assert max(held) <= 35 + 2 * 20 + 20
    assert stream.length == 4000
    assert len(tbptt.history) == 20


def test_evaluate_over_chunks_is_evaluate_over_the_whole():
    whole, parts = pieces()
    model = nn.GRU(2, 4)
    ours = at.evaluate(model, F.mse_loss, at.ChunkStream(parts), chunk=4)
    assert ours == pytest.approx(
        at.evaluate(model, F.mse_loss, at.SequenceStream(*whole)), rel=1e-6
    )


def test_resuming_reads_the_source_again_up_to_the_cursor():
    _, parts = pieces()
    stream = at.ChunkStream(parts)
    stream.reserve(10)
    stream.read(25)
    stream.forget(20)
    saved = stream.state_dict()
    other = at.ChunkStream(parts)
    other.load_state_dict(saved)
    assert other.state_dict() == saved
    assert torch.equal(other.read(8).inputs, stream.read(8).inputs)
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    cuts = [
        s.random_segment(10, g).inputs for s, g in zip((stream, other), generators, strict=True)
    ]
    assert torch.equal(*cuts)
    with pytest.raises(ValueError, match="does not yield the chunks"):
        at.ChunkStream(parts[:3]).load_state_dict(saved)


def test_a_data_loader_of_consecutive_chunks():
    x, y = torch.randn(6, 10, 3, 2), torch.randn(6, 10, 3, 4)
    loader = DataLoader(TensorDataset(x, y), batch_size=None)
    stream = at.ChunkStream(loader)
    assert torch.equal(stream.read(60).inputs, x.flatten(0, 1))
    with pytest.raises(ValueError, match="shuffles"):
        at.ChunkStream(DataLoader(TensorDataset(x, y), batch_size=None, shuffle=True))
    whole = DistributedSampler(range(6), num_replicas=1, rank=0, shuffle=False)
    at.ChunkStream(DataLoader(TensorDataset(x, y), sampler=whole))
    for sampler in (
        RandomSampler(range(6)),
        SubsetRandomSampler(range(6)),
        WeightedRandomSampler([1.0] * 6, 6),
        DistributedSampler(range(6), num_replicas=1, rank=0),
    ):
        with pytest.raises(ValueError, match="shuffles"):
            at.ChunkStream(DataLoader(TensorDataset(x, y), sampler=sampler))


def test_a_run_that_is_resumed_where_an_estimate_is_due_probes_the_same_steps():
    _, parts = pieces((10,) * 12)
    model = nn.GRU(2, 4)

    def new():
        control = at.BiasTolerance(delta=0.3, k_max=8, lags=12, k_init=4, gauge=PAPER)
        tbptt = at.AdaptiveTBPTT(
            model, F.mse_loss, control, losses=10, burn_in=0, estimate_every=50
        )
        return tbptt, at.ChunkStream(parts)

    tbptt, stream = new()
    for i, window in enumerate(tbptt.windows(stream)):
        window.backward()
        if i == 4:
            saved = tbptt.state_dict(), stream.state_dict()
    other, stream = new()
    other.load_state_dict(saved[0])
    stream.load_state_dict(saved[1])
    for window in other.windows(stream):
        window.backward()
    assert other.history == tbptt.history
    assert len(tbptt.history) == 2


def test_a_loader_draws_its_random_numbers_when_it_is_read():
    loader = DataLoader(TensorDataset(torch.zeros(2, 5, 1, 2), torch.zeros(2, 5, 1)))
    before = torch.get_rng_state()
    stream = at.ChunkStream(loader)
    stream.rewind()
    stream.load_state_dict(stream.state_dict())
    assert torch.equal(torch.get_rng_state(), before)
    stream.available(1)
    assert not torch.equal(torch.get_rng_state(), before)


def test_to_rewind_twice_is_to_rewind_once():
    readings = []

    def source():
        readings.append(len(readings))
        yield torch.full((5, 1, 2), float(readings[-1])), torch.zeros(5, 1)

    stream = at.ChunkStream(source)
    for epoch in range(3):
        assert stream.read(5).inputs.unique().tolist() == [epoch]
        stream.rewind()
        stream.rewind()


def test_a_source_may_fill_the_same_buffer_again():
    _, parts = pieces((5,) * 8)

    def reusing():
        x, y = torch.empty(5, 3, 2), torch.empty(5, 3, 4)
        for inputs, targets in parts:
            yield x.copy_(inputs), y.copy_(targets)

    model, twin = nn.GRU(2, 4), nn.GRU(2, 4)
    twin.load_state_dict(model.state_dict())
    ours = train(model, at.ChunkStream(reusing), estimate_every=20)
    theirs = train(twin, at.ChunkStream(parts), estimate_every=20)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_none_is_not_the_end_of_a_source():
    _, parts = pieces()
    with pytest.raises(TypeError, match="got NoneType at step 12"):
        at.ChunkStream([*parts[:2], None, *parts[2:]]).available(1000)


def test_a_source_without_chunks_is_said_to_be_empty():
    _, parts = pieces()
    spent = iter(parts)
    list(spent)
    model = nn.GRU(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for source in ([], spent, lambda: spent):
        tbptt = at.AdaptiveTBPTT(model, F.mse_loss, 3)
        with pytest.raises(ValueError, match="empty: it yields no chunk"):
            at.Trainer(tbptt, optimizer, show=False).fit(at.ChunkStream(source), epochs=1)


def test_other_chunks_of_the_same_size_are_said_to_be_other():
    _, parts = pieces()
    stream = at.ChunkStream(parts)
    stream.read(25)
    other = at.ChunkStream(pieces()[1])
    with pytest.warns(UserWarning, match=r"the data differ .* from step 25 of the new"):
        other.load_state_dict(stream.state_dict())


def test_sources_that_cannot_be_right():
    _, parts = pieces()
    narrower = [*parts, (torch.zeros(4, 2, 2), torch.zeros(4, 2, 4))]
    with pytest.raises(ValueError, match="step 60 has 2 rows, those before it 3"):
        at.ChunkStream(narrower).available(1000)
    with pytest.raises(TypeError, match=r"\(inputs, targets\)"):
        at.ChunkStream([torch.zeros(3, 2)]).available(1)
    with pytest.raises(ValueError, match="empty"):
        _ = at.ChunkStream([]).rows
    with pytest.raises(ValueError, match=r"targets have \(time, batch\)"):
        at.ChunkStream([(torch.zeros(4, 2, 2), torch.zeros(3, 2))]).available(1)
    once = at.ChunkStream(part for part in parts)
    assert at.evaluate(nn.GRU(2, 4), F.mse_loss, once) > 0
    with pytest.raises(ValueError, match="only once"):
        once.read(1)


def test_the_probes_share_is_kept_to_the_end():
    _, parts = pieces(lengths=(5,) * 12)
    stream = at.ChunkStream(parts)
    control = at.BiasTolerance(delta=0.9, k_max=8, lags=25, k_init=3, gauge=PAPER)
    tbptt = at.AdaptiveTBPTT(nn.GRU(2, 4), F.mse_loss, control, estimate_every=10, burn_in=2)
    for window in tbptt.windows(stream):
        window.backward()
    assert len(tbptt.history) >= 5


def test_a_random_segment_between_epochs_reads_no_further_than_it_must():
    _, parts = pieces((10,) * 40)
    read = []

    def source():
        for part in parts:
            read.append(1)
            yield part

    stream = at.ChunkStream(source)
    while stream.available(stream.cursor + 10) > stream.cursor:
        stream.cursor += 10
        stream.forget(stream.cursor)
    stream.rewind()
    read.clear()
    stream.random_segment(15)
    assert len(read) == 2


def test_a_schedule_per_epoch_needs_a_length():
    _, parts = pieces()
    control = at.BiasTolerance(delta=0.5, lags=5, k_init=3, gauge=PAPER)
    tbptt = at.AdaptiveTBPTT(nn.GRU(2, 4), F.mse_loss, control)
    with pytest.raises(ValueError, match="estimate_every"):
        next(iter(tbptt.windows(at.ChunkStream(parts))))


def test_segments_are_chunks():
    x, y = torch.randn(10, 2, 3), torch.randn(10, 2)
    whole = at.SequenceStream(x, y, torch.rand(10, 2) < 0.5, state=torch.ones(2, 4))
    stream = at.ChunkStream([whole.segment(0, 4), whole.segment(4, 10)])
    found = stream.read(7)
    assert torch.equal(found.inputs, x[:7])
    assert torch.equal(found.resets, whole.segment(0, 7).resets)
    assert found.start is None
