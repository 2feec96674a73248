"""End points of a stream: their histories, and the states that full histories leave."""

from itertools import islice

import pytest
import torch
from torch import nn

import adaptive_tbptt as at
from adaptive_tbptt.measure.end_points import COLUMNS, draw_end_points
from adaptive_tbptt.model import Objective

LONGEST = 10


def drawn(stream, model=None, groups=3, seed=0):
    model = nn.GRU(1, 3).double() if model is None else model
    objective = Objective.of(model, nn.functional.mse_loss)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        return list(islice(draw_end_points(objective, stream, LONGEST, generator), groups))


def numbered(steps, rows):
    """Inputs that say which step of which row they are."""
    return (torch.arange(steps)[:, None] * 1000.0 + torch.arange(rows))[..., None].double()


@pytest.mark.parametrize(("rows", "columns"), [(1, 25), (5, 65), (200, COLUMNS)])
def test_every_column_is_a_stretch_of_its_row_and_enters_with_the_carried_state(rows, columns):
    torch.manual_seed(0)
    model, x = nn.GRU(1, 3).double(), numbered(35, rows)
    scaled = x / 1e4
    resets = torch.rand(35, rows) < 0.1
    truth = torch.zeros(36, rows, 3).double()  # entering every step, before any reset
    with torch.no_grad():
        for t in range(35):
            state = truth[t].where(~resets[t][:, None], torch.zeros(()).double())
            truth[t + 1] = model(scaled[t : t + 1], state[None])[1][0]
    for points in drawn(at.SequenceStream(scaled, x, resets), model):
        last = points.targets[0, :, 0].long()
        ends, places = last // 1000, last % 1000
        assert ends.min() >= LONGEST
        assert places.max() >= min(rows - 1, COLUMNS)  # rows are drawn from all of them
        assert points.history.rows == len(set(last.tolist())) == columns
        for column, (end, row) in enumerate(zip(ends.tolist(), places.tolist(), strict=True)):
            steps = slice(end - LONGEST + 1, end + 1)
            assert torch.equal(points.history.targets[:, column], x[steps, row])
            assert torch.equal(points.history.resets[:, column], resets[steps, row])
            assert torch.allclose(points.entering[0, column], truth[end, row], atol=1e-12)


def test_the_full_history_of_a_long_stream_is_at_least_twice_the_longest():
    class Counter(nn.Module):
        def forward(self, x, state):
            state = x.new_zeros(x.shape[1], 1) if state is None else state
            counts = state + torch.arange(1.0, len(x) + 1)[:, None, None]
            return counts, counts[-1]

    x = numbered(1000, 4)
    read = torch.cat([p.entering for p in drawn(at.SequenceStream(x, x), Counter(), groups=20)])
    assert read.min() >= 2 * LONGEST - 1  # and the present one
    assert read.max() <= 4 * LONGEST - 1
    assert read.max() > 3 * LONGEST


def test_chunks_are_not_read_beyond_one_stretch():
    taken = []

    def chunks():
        for i in range(100):
            taken.append(i)
            yield numbered(8, 4), numbered(8, 4)

    stream = at.ChunkStream(chunks)
    drawn(stream)
    assert stream.cursor == 0
    assert len(taken) == 5  # 40 steps
