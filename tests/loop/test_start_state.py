"""A stream that starts from a state of its own, and burn-in, against loops by hand."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at
from adaptive_tbptt.data.nest import leaves, map_leaves
from adaptive_tbptt.distributed.row_shard import RowShard
from adaptive_tbptt.measure import LagRequest, LevelRequest
from adaptive_tbptt.measure.sampling import Source
from adaptive_tbptt.model.objective import Objective
from adaptive_tbptt.model.running import entering

STEPS, ROWS, HIDDEN = 24, 5, 4


class Residual(nn.Module):
    """A dict as the state, its rows in front."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(3 + HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, state):
        h = x.new_zeros(x.shape[1], HIDDEN) if state is None else state["h"]
        hidden = []
        for step in x:
            h = 0.7 * h + torch.tanh(self.inner(torch.cat([step, h], 1)))
            hidden.append(h)
        return self.out(torch.stack(hidden)), {"h": h}


def layer_state(parts):
    state = tuple(torch.randn(1, ROWS, HIDDEN).double() for _ in range(parts))
    return state if parts > 1 else state[0]


MODELS = {
    "gru": (lambda: nn.GRU(3, HIDDEN), lambda: layer_state(1)),
    "lstm, batch first": (lambda: nn.LSTM(3, HIDDEN, batch_first=True), lambda: layer_state(2)),
    "dict": (Residual, lambda: {"h": torch.randn(ROWS, HIDDEN).double()}),
}


class Case:
    """A model, data, a start state; `run(rows of steps, state)` time first."""

    def __init__(self, kind, resets=False):
        torch.manual_seed(0)
        model, state = MODELS[kind]
        self.model, self.state = model().double(), state()
        self.x = torch.randn(STEPS, ROWS, 3).double()
        self.y = torch.randn(STEPS, ROWS, HIDDEN).double()
        self.resets = None
        if resets:
            self.resets = torch.zeros(STEPS, ROWS, dtype=torch.bool)
            self.resets[0, 1] = self.resets[7, 2] = self.resets[10, 0] = True

    def stream(self, **options):
        return at.SequenceStream(self.x, self.y, self.resets, state=self.state, **options)

    def run(self, start, stop, state):
        """One step at a time, resets by (1 - done)."""
        turned = getattr(self.model, "batch_first", False)
        outputs = []
        for t in range(start, stop):
            if self.resets is not None:
                keep = (~self.resets[t]).double()[:, None]
                state = map_leaves(lambda leaf, keep=keep: leaf * keep, state)
            x = self.x[t : t + 1]
            out, state = self.model(x.transpose(0, 1) if turned else x, state)
            outputs.append(out.transpose(0, 1) if turned else out)
        return torch.cat(outputs), state

    def gradient(self, start, first, stop):
        """Of the losses of steps `first` to `stop`, cut before step `start`."""
        state = self.state
        if start:
            with torch.no_grad():
                _, state = self.run(0, start, state)
        self.model.zero_grad()
        outputs, _ = self.run(start, stop, state)
        loss = F.mse_loss(outputs[first - start :], self.y[first:stop])
        loss.backward()
        return loss.item(), self.flat()

    def flat(self):
        return torch.cat([p.grad.flatten() for p in self.model.parameters()])


def same(a, b):
    return torch.allclose(a, b, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_windows_start_from_the_state_of_the_stream(kind, resets):
    case = Case(kind, resets)
    tbptt = at.AdaptiveTBPTT(case.model, F.mse_loss, 9, losses=8)
    for _ in range(2):  # every epoch starts from it
        seen = []
        for window in tbptt.windows(case.stream()):
            case.model.zero_grad()
            loss = window.backward().item()
            found = case.flat().clone()
            truth = case.gradient(window.start, window.first, window.stop)
            assert loss == pytest.approx(truth[0], rel=1e-12)
            assert same(found, truth[1])
            seen.append((window.start, window.first, window.stop))
        assert seen == [(0, 0, 8), (0, 8, 16), (7, 16, 24)]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("stored", [True, False])
def test_burn_in_warms_up_and_carries_neither_loss_nor_gradient(kind, stored):
    case = Case(kind)
    if not stored:
        case.state = map_leaves(torch.zeros_like, case.state)
    options = {"state": case.state} if stored else {}
    stream = at.SequenceStream(case.x, case.y, burn_in=8, **options)
    for losses, spans in ((16, [(8, 8, 24)]), (8, [(8, 8, 16), (8, 16, 24)])):
        tbptt = at.AdaptiveTBPTT(case.model, F.mse_loss, 20, losses=losses)
        seen = []
        assert len(tbptt.windows(stream)) == len(spans)
        for window in tbptt.windows(stream):
            case.model.zero_grad()
            window.backward()
            found = case.flat().clone()
            assert same(found, case.gradient(window.start, window.first, window.stop)[1])
            seen.append((window.start, window.first, window.stop))
        assert seen == spans
        assert tbptt.trained_steps == 16
        assert stream.cursor == 8
    with torch.no_grad():
        outputs, _ = case.run(0, STEPS, case.state)
    truth = F.mse_loss(outputs[8:], case.y[8:]).item()
    assert at.evaluate(case.model, F.mse_loss, stream, chunk=5) == pytest.approx(truth, rel=1e-12)


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_an_evaluation_starts_from_it(kind, resets):
    case = Case(kind, resets)
    with torch.no_grad():
        outputs, _ = case.run(0, STEPS, case.state)
    truth = F.mse_loss(outputs, case.y).item()
    chunks = [(case.x[:7], case.y[:7]), (case.x[7:], case.y[7:])]
    if resets:
        chunks = [(*c, r) for c, r in zip(chunks, case.resets.split([7, 17]), strict=True)]
    for stream in (case.stream(), at.ChunkStream(chunks, state=case.state)):
        for chunk in (5, 99):
            found = at.evaluate(case.model, F.mse_loss, stream, chunk=chunk)
            assert found == pytest.approx(truth, rel=1e-12)


def test_chunks_start_from_it_in_every_epoch():
    case = Case("gru")
    chunks = [(case.x[:7], case.y[:7]), (case.x[7:], case.y[7:])]
    stream = at.ChunkStream(chunks, state=case.state)
    tbptt = at.AdaptiveTBPTT(case.model, F.mse_loss, 9, losses=8)
    for _ in range(2):
        for window in tbptt.windows(stream):
            case.model.zero_grad()
            window.backward()
            found = case.flat().clone()
            assert same(found, case.gradient(window.start, window.first, window.stop)[1])


@pytest.mark.parametrize("kind", MODELS)
def test_rows_are_dealt_to_processes_with_their_states(kind):
    case = Case(kind)
    shard = RowShard(case.stream(burn_in=3), lambda rows: range(1, rows - 1))
    with torch.no_grad():
        outputs, _ = case.run(0, STEPS, case.state)
    truth = F.mse_loss(outputs[3:, 1:-1], case.y[3:, 1:-1]).item()
    assert at.evaluate(case.model, F.mse_loss, shard) == pytest.approx(truth, rel=1e-12)


@pytest.mark.parametrize("kind", MODELS)
def test_a_random_segment_starts_from_it_where_it_begins_with_the_stream(kind):
    case = Case(kind)
    recurrent = Objective.of(case.model, F.mse_loss).recurrent
    generator, numbers = torch.Generator().manual_seed(0), torch.arange(STEPS).double()
    numbers = numbers[:, None, None].expand(STEPS, ROWS, 3)
    stream = at.SequenceStream(numbers, case.y, state=case.state)
    dim = 0 if kind == "dict" else 1
    mixed = 0
    for _ in range(40):
        segment = stream.random_segment(STEPS - 1, generator)
        here = segment.inputs[0, :, 0] == 0
        state = entering(recurrent, segment)
        if not here.any():
            assert state is None
            continue
        mixed += not here.all()
        for found, given in zip(leaves(state), leaves(case.state), strict=True):
            rows = zip(here, found.unbind(dim), given.unbind(dim), strict=True)
            for at_start, row, own in rows:
                assert torch.equal(row, own if at_start else torch.zeros_like(own))
    assert mixed > 10
    assert stream.segment(1, STEPS).start is None


@pytest.mark.parametrize("kind", MODELS)
def test_measurements_start_from_it(kind):
    case = Case(kind)
    objective = Objective.of(case.model, F.mse_loss)
    source = Source(objective, case.stream(), 2, torch.Generator().manual_seed(0))
    profile = LagRequest(STEPS - 2).measure(source)
    turned = [x.transpose(0, 1) if kind == "lstm, batch first" else x for x in (case.x, case.y)]
    truth = at.probe(case.model, F.mse_loss, *turned, state=case.state, burn_in=2)
    np.testing.assert_allclose(profile.state_norms, truth.state_norms, rtol=1e-10)
    sums = LevelRequest((0, 6, 12), losses=10, segments=1).measure(source)
    for level, context in enumerate((0, 6, 12)):
        expected = case.gradient(14 - context, 14, STEPS)[1]
        found = torch.from_numpy(sums.vectors[0, : level + 1].sum(0)) / sums.counts[0]
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)


def test_a_measurement_does_not_reach_into_the_burn_in():
    case = Case("gru")
    source = Source(
        Objective.of(case.model, F.mse_loss),
        case.stream(burn_in=8),
        2,
        torch.Generator().manual_seed(0),
    )
    sums = LevelRequest((0, 6), losses=10, segments=1).measure(source)
    assert sums.vectors.any()
    with pytest.raises(ValueError, match="does not fit"):
        LevelRequest((0, 7), losses=10, segments=1).measure(source)
    sampling = at.diagnosis.Sampling(burn_in=0)
    stream = case.stream(burn_in=8)
    report = at.diagnose(case.model, F.mse_loss, stream, 10, segments=10, sampling=sampling)
    assert report.curve.lags == 6


@pytest.mark.filterwarnings("ignore:the data differ")
@pytest.mark.parametrize("again", [True, False])
def test_a_resumed_loop_reaches_back_to_the_state_of_the_stream(again):
    """The checkpoint holds it, also if the new stream does not."""

    def losses(stop, saved=None):
        case = Case("lstm, batch first")
        stream, found = case.stream(), []
        if saved is not None and not again:
            stream = at.SequenceStream(case.x, case.y)
        tbptt = at.AdaptiveTBPTT(case.model, F.mse_loss, 20, losses=4)
        if saved is not None:
            tbptt.load_state_dict(saved[0])
            stream.load_state_dict(saved[1])
        for window in tbptt.windows(stream):
            found.append(window.backward().item())
            if window.stop == stop:
                return found, (tbptt.state_dict(), stream.state_dict())
        return found, None

    whole, _ = losses(None)
    first, saved = losses(8)
    assert first + losses(None, saved)[0] == whole


def test_another_state_is_other_data():
    case = Case("gru")
    saved = case.stream().state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case.stream().load_state_dict(saved)
    for state in (case.state + 1, None):
        with pytest.warns(UserWarning, match="data differ"):
            at.SequenceStream(case.x, case.y, state=state).load_state_dict(saved)


def test_a_new_stream_for_every_batch_is_not_checked_again():
    """A replay buffer: the first stream is checked, the others cost their windows alone."""
    case, calls = Case("gru"), []

    def loss_fn(outputs, targets):
        calls.append(len(outputs))
        return F.mse_loss(outputs, targets)

    tbptt = at.AdaptiveTBPTT(case.model, loss_fn, 0, losses=16)
    counts = []
    for rows in ([0, 1, 2], [4, 1], [3, 3, 0, 1]):
        state = case.state[:, rows]
        stream = at.SequenceStream(case.x[:, rows], case.y[:, rows], state=state, burn_in=8)
        calls.clear()
        case.model.zero_grad()
        (loss,) = [window.backward().item() for window in tbptt.windows(stream)]
        counts.append(len(calls))
        with torch.no_grad():
            outputs, _ = case.model(case.x[:, rows], state)
        assert loss == pytest.approx(F.mse_loss(outputs[8:], case.y[8:, rows]).item(), rel=1e-12)
    assert counts[0] > 1
    assert counts[1:] == [1, 1]


def test_no_gradient_goes_into_the_state():
    case = Case("gru")
    grown = (case.state.requires_grad_() * 1).tanh()
    stream = at.SequenceStream(case.x, case.y, state=grown)
    for window in at.AdaptiveTBPTT(case.model, F.mse_loss, 0, losses=STEPS).windows(stream):
        window.backward()
    assert case.state.grad is None


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            torch.zeros(1, 4, HIDDEN),
            r"'state' has shape \(1, 4, 4\); GRU carries \(1, 5, 4\) for 5",
        ),
        (torch.zeros(ROWS, HIDDEN), r"\(5, 4\); GRU carries \(1, 5, 4\).* dimension 1 counts"),
        ((torch.zeros(1, ROWS, HIDDEN),) * 2, r"2 tensors \('0' \(1, 5, 4\).*that of GRU has 1"),
    ],
)
def test_a_state_of_another_layout_is_refused_by_name(state, message):
    case = Case("gru")
    stream = at.SequenceStream(case.x, case.y, state=map_leaves(torch.Tensor.double, state))
    with pytest.raises(ValueError, match=message):
        next(iter(at.AdaptiveTBPTT(case.model, F.mse_loss, 4).windows(stream))).backward()
    with pytest.raises(ValueError, match=message):
        at.evaluate(case.model, F.mse_loss, stream)


def test_a_state_without_tensors_and_a_burn_in_without_a_loss_are_refused():
    x, y = torch.zeros(6, 2, 3), torch.zeros(6, 2, 4)
    with pytest.raises(TypeError, match=r"state must be a nest of tensors.* all 2 rows, got list"):
        at.SequenceStream(x, y, state=[1.0])
    for burn_in in (-1, 6):
        with pytest.raises(ValueError, match=r"burn_in must be in \[0, 5\]"):
            at.SequenceStream(x, y, burn_in=burn_in)


def test_steps_of_the_burn_in_do_not_delay_an_estimate():
    data = torch.randn(120, 4, 3), torch.randn(120, 4, 5)
    stream = at.SequenceStream(*data, burn_in=40)
    controller = at.BiasTolerance(0.3, k_max=8, lags=8)
    tbptt = at.AdaptiveTBPTT(
        nn.RNN(3, 5), nn.MSELoss(), controller, losses=20, estimates_per_epoch=1
    )
    for _ in range(3):
        for window in tbptt.windows(stream):
            window.backward()
    assert [estimate.step for estimate in tbptt.history] == [0, 80, 160]
