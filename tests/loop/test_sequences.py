"""Sequences of different lengths train as a loop over each of them alone would."""

import numpy as np
import pytest
import torch
from torch import nn

import adaptive_tbptt as at
from adaptive_tbptt.data.layout import pack_rows
from adaptive_tbptt.data.nest import map_leaves
from adaptive_tbptt.measure.lag_probe import probe_segment
from adaptive_tbptt.model.objective import Objective

from ..oracle import CoreHead, DictState

LENGTHS, ROWS, CLASSES = (9, 4, 12, 6, 1, 3, 5), 3, 2
pytestmark = pytest.mark.filterwarnings("ignore::adaptive_tbptt.TruncationWarning")


def sequences(classes=False):
    g = torch.Generator().manual_seed(4)
    found = []
    for n in LENGTHS:
        x = torch.randn(n, 3, generator=g, dtype=torch.float64)
        y = torch.randn(n, CLASSES, generator=g, dtype=torch.float64)
        found.append((x, y.argmax(-1) if classes else y))
    return found


def cross_entropy(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def flat_mse(outputs, targets):
    return nn.functional.mse_loss(outputs.reshape(-1, CLASSES), targets.reshape(-1, CLASSES))


class Steps(nn.Module):
    """A GRU with a readout in its forward: outputs, but no features."""

    def __init__(self, batch_first=False):
        super().__init__()
        self.batch_first = batch_first
        self.gru, self.out = nn.GRU(3, 4, batch_first=batch_first), nn.Linear(4, CLASSES)

    def forward(self, x, state):
        h, state = self.gru(x, state)
        return self.out(h), state


CASES = {
    "rnn": (lambda: nn.RNN(3, CLASSES), nn.MSELoss()),
    "lstm": (lambda: nn.LSTM(3, CLASSES, 2), nn.MSELoss()),
    "gru, batch first": (lambda: nn.GRU(3, CLASSES, batch_first=True), nn.MSELoss()),
    "core and head": (lambda: CoreHead(nn.LSTM(3, 4), 4, CLASSES), cross_entropy),
    "whole, batch first": (lambda: Steps(batch_first=True), cross_entropy),
    "dict state, flat outputs": (DictState, flat_mse),
}
CONTROLS = {
    "fixed": at.FixedTruncation(3),
    "none": at.FixedTruncation(0),
    "all": at.FixedTruncation(40),
    "unbiased": at.Unbiased(k_max=8),
    "measured": at.BiasTolerance(0.3, k_max=6, lags=6),
    "paper": at.BiasTolerance(0.3, k_max=6, lags=6, gauge=at.truncate.PaperGauge()),
}


def make(name):
    torch.manual_seed(0)
    build, loss_fn = CASES[name]
    return build().double(), loss_fn, sequences(classes=loss_fn is cross_entropy)


def places(data):
    """(sequence, step of the stream at which it begins), row by row."""
    found = []
    for row in pack_rows([len(x) for x, _ in data], ROWS, range(len(data))):
        at_step = 0
        for i in row:
            found.append((i, at_step))
            at_step += len(data[i][0])
    return found


def run_alone(model, x, state):
    """One sequence, as the only row."""
    if getattr(model, "batch_first", False):
        outputs, state = model(x[None], state)
        return outputs[0][:, None], state
    return model(x[:, None], state)


def by_hand(model, loss_fn, data, start, first, stop, factors=None):
    """The mean loss of a window: every sequence on its own, one after the other."""
    total, count = 0.0, 0
    for i, begin in places(data):
        x, y = data[i]
        a, b = max(start - begin, 0), min(stop - begin, len(x))
        if a >= b:
            continue
        state = None
        if a > 0:
            with torch.no_grad():
                _, state = run_alone(model, x[:a], None)
        outputs = []
        for t in range(a, b):
            factor = (factors or {}).get(begin + t, 1.0)
            if t > a and factor != 1.0:
                state = map_leaves(
                    lambda s, f=factor: (
                        f * s + (1 - f) * s.detach() if s.is_floating_point() else s
                    ),
                    state,
                )
            out, state = run_alone(model, x[t : t + 1], state)
            outputs.append(out.reshape(1, 1, CLASSES))
        n = b - max(first - begin, a)
        if n > 0:
            total = total + n * loss_fn(torch.cat(outputs)[-n:], y[b - n : b, None])
            count += n
    return total / count, count


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("name", CASES)
def test_a_window_has_the_gradient_of_every_sequence_on_its_own(name, control):
    model, loss_fn, data = make(name)
    stream = at.SequenceStream.from_sequences(data, rows=ROWS)
    assert stream.segment(0, stream.length).present is not None
    tbptt = at.AdaptiveTBPTT(model, loss_fn, CONTROLS[control], losses=3, burn_in=2)
    weights, contexts = 0.0, set()
    for window in tbptt.windows(stream):
        loss = window.backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        span = window.start, window.first, window.stop
        expected, count = by_hand(model, loss_fn, data, *span, window.factors)
        assert window.weight == count
        torch.testing.assert_close(loss, expected.detach())
        gradients = torch.autograd.grad(expected, list(model.parameters()))
        torch.testing.assert_close(found, list(gradients))
        weights += window.weight
        contexts.add(window.first - window.start)
    assert weights == sum(LENGTHS)
    assert len(contexts) > 1 or control == "none"


@pytest.mark.parametrize("name", CASES)
def test_levels_have_the_gradient_of_every_sequence_on_its_own(name):
    model, loss_fn, data = make(name)
    stream = at.SequenceStream.from_sequences(data, rows=ROWS)
    objective, stop = Objective.of(model, loss_fn), stream.length
    parameters, contexts = list(model.parameters()), (0, 2, 5, stop - 4)
    found = at.measure.level_gradients(
        objective, stream.segment(0, stop), None, contexts, parameters
    )
    for level, context in enumerate(contexts):
        span = stop - 4 - context, stop - 4, stop
        expected, count = by_hand(model, loss_fn, data, *span)
        assert found.count == count < 4 * ROWS
        gradients = torch.autograd.grad(expected, parameters)
        torch.testing.assert_close(found.up_to(level), list(gradients))


@pytest.mark.parametrize("name", CASES)
def test_evaluate_is_the_mean_over_all_steps_of_all_sequences(name):
    model, loss_fn, data = make(name)
    stream = at.SequenceStream.from_sequences(data, rows=ROWS, shuffle=True, seed=2)
    sums = [len(x) * loss_fn(run_alone(model, x, None)[0], y[:, None]) for x, y in data]
    expected = float(sum(sums).detach()) / sum(LENGTHS)
    assert at.check(model, loss_fn, stream) == []
    for chunk in (256, 4):
        assert at.evaluate(model, loss_fn, stream, chunk=chunk) == pytest.approx(expected)


def test_a_window_of_padding_alone_has_no_loss_and_no_gradient():
    model = nn.RNN(3, CLASSES).double()
    x, y = torch.randn(8, 2, 3).double(), torch.randn(8, 2, CLASSES).double()
    present = torch.arange(8)[:, None] < torch.tensor([4, 2])
    stream = at.SequenceStream(x, at.data.Padded(y, present))
    seen = []

    def loss_fn(outputs, targets):
        seen.append(tuple(outputs.shape))
        return nn.functional.mse_loss(outputs, targets)

    found = []
    for window in at.AdaptiveTBPTT(model, loss_fn, 0, losses=3).windows(stream):
        seen.clear()
        loss = window.backward()
        found.append((window.weight, list(seen), float(loss) == 0.0))
    assert found == [
        (5.0, [(5, 1, CLASSES)], False),
        (1.0, [(1, 1, CLASSES)], False),
        (0.0, [], True),
    ]
    assert at.evaluate(model, loss_fn, stream, chunk=3) > 0


def test_masks_of_the_loss_and_padding_count_together():
    model, loss_fn = nn.RNN(3, 2), lambda o, t: nn.functional.cross_entropy(o.mT, t)
    data = [(torch.randn(n, 3), torch.tensor([-100, *[0] * (n - 1)])) for n in (5, 2)]
    stream = at.SequenceStream.from_sequences(data, rows=2)
    (window,) = at.AdaptiveTBPTT(model, loss_fn, 0, losses=5).windows(stream)
    window.backward()
    assert window.weight == 5
    counted = []

    def count(targets):
        counted.append(tuple(targets.shape))
        return float((targets >= 0).sum())

    tbptt = at.AdaptiveTBPTT(model, loss_fn, 0, losses=5, count_losses=count)
    (window,) = tbptt.windows(stream)
    counted.clear()
    window.backward()
    assert (counted, window.weight) == ([(7, 1)], 5)


def test_where_nothing_is_padded_the_loss_sees_what_it_always_saw():
    torch.manual_seed(0)
    model, shapes = nn.GRU(3, CLASSES), []
    x, y = torch.randn(12, 2, 3), torch.randn(12, 2, CLASSES)

    def loss_fn(outputs, targets):
        shapes.append(tuple(targets.shape))
        return nn.functional.mse_loss(outputs, targets)

    def gradients(stream):
        shapes.clear()
        for window in at.AdaptiveTBPTT(model, loss_fn, 2, losses=4).windows(stream):
            window.backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return found, shapes.copy()

    given = [(x[:, row], y[:, row]) for row in range(2)]
    theirs, seen = gradients(at.SequenceStream(x, y))
    ours, also = gradients(at.SequenceStream.from_sequences(given, rows=2))
    assert all(map(torch.equal, ours, theirs))
    assert seen == also
    mask = at.data.Padded(y, torch.ones(12, 2, dtype=torch.bool))
    assert all(map(torch.equal, gradients(at.SequenceStream(x, mask))[0], theirs))


def test_a_probe_sees_the_rows_that_are_present_at_its_last_step():
    model, loss_fn, _ = make("rnn")
    objective = Objective.of(model, loss_fn)
    x = torch.randn(6, 4, 3).double()
    y, present = torch.randn(6, 4, CLASSES).double(), torch.ones(6, 4, dtype=torch.bool)
    present[4:, 1] = present[5:, 2] = False
    padded = at.data.Padded(y, present)
    profile = probe_segment(objective, at.data.Segment(x, padded))
    kept = [0, 3]
    alone = probe_segment(objective, at.data.Segment(x[:, kept], y[:, kept]))
    assert not profile.state_norms[:, [1, 2]].any()
    # As with masked targets, the mean is over two losses while four rows share it.
    np.testing.assert_allclose(profile.state_norms[:, kept] / 2, alone.state_norms)


def test_outputs_that_cannot_be_cut_are_named():
    class Odd(nn.RNN):
        def forward(self, x, state=None):
            h, state = super().forward(x, state)
            return {"y": h, "mean": h.mean(0)}, state

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.odd = Odd(3, 2)

        def forward(self, x, state):
            return self.odd(x, state)

    data = [(torch.randn(n, 3), torch.randn(n, 2)) for n in (5, 2)]
    stream = at.SequenceStream.from_sequences(data, rows=2)
    tbptt = at.AdaptiveTBPTT(Wrapped(), lambda o, t: nn.functional.mse_loss(o["y"], t), 0, losses=5)
    (window,) = tbptt.windows(stream)
    with pytest.raises(ValueError, match=r"leaf 'mean'\) have shape \(2, 2\).*= \(5, 2\), or flat"):
        window.backward()


@pytest.mark.parametrize("once", [False, True])
def test_static_inputs_train_as_features_written_out_by_hand(once):
    torch.manual_seed(0)
    model = nn.LSTM(5, CLASSES).double()
    g = torch.Generator().manual_seed(1)
    given = [(x, y, torch.randn(2, generator=g, dtype=torch.float64)) for x, y in sequences()]
    written = []
    for x, y, s in given:
        repeated = s.expand(len(x), 2).clone()
        if once:
            repeated[1:] = 0.0
        written.append((torch.cat([x, repeated], -1), y))
    stream = at.SequenceStream.from_sequences(given, rows=ROWS, static_once=once)
    for window in at.AdaptiveTBPTT(model, nn.MSELoss(), 3, losses=5).windows(stream):
        loss = window.backward()
        span = window.start, window.first, window.stop
        expected, _ = by_hand(model, nn.MSELoss(), written, *span)
        torch.testing.assert_close(loss, expected.detach())
