import pytest
import torch

import adaptive_tbptt as at


def make(steps=10, rows=3, **options):
    time = torch.arange(steps)[:, None] + 100 * torch.arange(rows)
    return at.SequenceStream({"t": time, "x": time[..., None].float()}, time, **options)


def test_reading_in_order_covers_every_step_once():
    stream = make()
    parts = [stream.read(4) for _ in range(3)]
    assert [p.targets.shape[0] for p in parts] == [4, 4, 2]
    assert stream.cursor == len(stream) == stream.available(99)
    assert torch.equal(torch.cat([p.inputs["t"] for p in parts])[:, 0], torch.arange(10))
    stream.rewind()
    assert stream.read(1).targets[0, 0] == 0


def test_batch_first_data_is_read_time_first():
    stream = at.SequenceStream(torch.zeros(3, 10, 2), torch.zeros(3, 10), batch_first=True)
    assert (len(stream), stream.rows) == (10, 3)
    assert stream.read(4).inputs.shape == (4, 3, 2)


def test_random_segments_are_contiguous_and_each_row_has_its_own_offset():
    resets = torch.zeros(1000, 50, dtype=torch.bool)
    resets[500] = True
    stream = make(1000, 50, resets=resets)
    generator = torch.Generator().manual_seed(0)
    segment = stream.random_segment(20, generator)
    time = segment.targets - 100 * torch.arange(50)
    assert (time.diff(dim=0) == 1).all()
    assert len(time[0].unique()) > 40
    assert torch.equal(segment.inputs["t"], segment.targets)
    assert torch.equal(segment.resets, time == 500)
    again = stream.random_segment(20, torch.Generator().manual_seed(0))
    assert torch.equal(again.targets, segment.targets)
    assert stream.cursor == 0


def test_a_segment_as_long_as_the_stream_is_the_stream():
    stream = make()
    assert torch.equal(stream.random_segment(10).targets, stream.read(10).targets)
    with pytest.raises(ValueError, match="11 steps does not fit"):
        stream.random_segment(11)


def test_state_dict_returns_to_the_cursor_and_refuses_other_data():
    stream = make()
    stream.read(7)
    saved = stream.state_dict()
    other = make()
    other.load_state_dict(saved)
    assert torch.equal(other.read(3).targets, stream.read(3).targets)
    with pytest.raises(ValueError, match="10 steps of 3 rows, this one 11"):
        make(11).load_state_dict(saved)


def test_resets_must_be_boolean():
    with pytest.raises(TypeError, match="boolean"):
        make(resets=torch.zeros(10, 3))


def test_every_offset_up_to_the_last_is_drawn():
    segment = make(5, 200).random_segment(3)
    offsets = segment.targets[0] - 100 * torch.arange(200)
    assert offsets.unique().tolist() == [0, 1, 2]
