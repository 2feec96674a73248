"""Levels 0..j together are the gradient of the window with context c_j, for any module."""

import copy
import weakref
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at
from adaptive_tbptt.data import Segment
from adaptive_tbptt.loop.window_pass import window_forward
from adaptive_tbptt.measure import level_gradients
from adaptive_tbptt.measure.sampling import trained_parameters
from adaptive_tbptt.model.running import advance, run_pieces

from ..oracle import CoreHead, DictState, lag_gradients, window_gradient

pytestmark = pytest.mark.usefixtures("double")
ROWS, INPUTS, OUT, LOSSES = 3, 3, 2, 4
CONTEXTS = (0, 1, 2, 5, 9)
STEPS = CONTEXTS[-1] + LOSSES


class Stack(nn.Module):
    """Two recurrences of different kinds behind each other, as core and head; a nested state."""

    def __init__(self):
        super().__init__()
        self.low, self.high, self.out = nn.LSTM(INPUTS, 4), nn.GRU(4, 3), nn.Linear(3, OUT)

    def core(self, x, state):
        low, high = (None, None) if state is None else (state["low"], state["high"][0])
        h, low = self.low(x, low)
        h, high = self.high(h, high)
        return h, {"low": low, "high": [high]}

    def head(self, features):
        return self.out(features)


class Rotating(nn.Module):
    """A complex diagonal recurrence with a real part of the state beside it."""

    def __init__(self):
        super().__init__()
        self.angle = nn.Parameter(torch.linspace(0.1, 1.0, 4))
        self.log_size = nn.Parameter(torch.linspace(0.8, 0.95, 4).log())
        self.shift = nn.Parameter(torch.randn(4, dtype=torch.cdouble))
        self.enter, self.out = nn.Linear(INPUTS, 8), nn.Linear(9, OUT)

    def forward(self, inputs, state):
        rows = inputs.shape[1]
        h, last = state or (torch.zeros(rows, 4, dtype=torch.cdouble), torch.zeros(rows, 1))
        outputs = []
        for x in inputs:
            h = torch.polar(self.log_size.exp(), self.angle) * h + self.shift
            h = h + torch.view_as_complex(self.enter(x).view(rows, 4, 2))
            last = 0.5 * last + x[:, :1]
            outputs.append(self.out(torch.cat([h.real, h.imag, last], dim=1)))
        return torch.stack(outputs), (h, last)


class Looped(nn.Module):
    """A loop in Python; its state is written in place where asked."""

    def __init__(self, in_place=False):
        super().__init__()
        self.cell, self.decay = nn.Linear(INPUTS, OUT), nn.Parameter(torch.tensor([0.9, 0.5]))
        self.in_place = in_place

    def forward(self, x, state):
        h = x.new_zeros(x.shape[1], OUT) if state is None else state
        outputs = []
        for step in self.cell(x):
            h = h.mul_(self.decay).add_(step) if self.in_place else h * self.decay + step
            outputs.append(torch.tanh(h))
        return torch.stack(outputs), h


class Learned(nn.Module):
    """Learns the state that a sequence starts from."""

    def __init__(self):
        super().__init__()
        self.gru, self.h0 = nn.GRU(INPUTS, OUT), nn.Parameter(torch.randn(OUT))

    def initial_state(self, rows):
        return self.h0.expand(1, rows, OUT).contiguous()

    def forward(self, x, state):
        return self.gru(x, self.initial_state(x.shape[1]) if state is None else state)


class Words(nn.Module):
    """A language model; the embedding may be the readout too, or have sparse gradients."""

    def __init__(self, tied=False, sparse=False, words=7, size=4):
        super().__init__()
        self.embedding = nn.Embedding(words, size, sparse=sparse)
        self.lstm, self.readout = nn.LSTM(size, size), nn.Linear(size, words, bias=False)
        if tied:
            self.readout.weight = self.embedding.weight

    def core(self, x, state):
        return self.lstm(self.embedding(x), state)

    def head(self, h):
        return self.readout(h)


class Masked(nn.CrossEntropyLoss):
    def forward(self, logits, targets):
        return super().forward(logits.flatten(0, 1), targets.flatten())


class Dropped(nn.Module):
    """Dropout in front of, inside of, and behind a recurrence, and on the state itself."""

    def __init__(self):
        super().__init__()
        self.lstm, self.drop = nn.LSTM(INPUTS, 4, 2, dropout=0.4), nn.Dropout(0.3)
        self.out = nn.Linear(4, OUT)

    def core(self, x, state):
        h, (a, c) = self.lstm(self.drop(x), state)
        return h, (self.drop(a), c)

    def head(self, h):
        return self.out(self.drop(h))


def flat_mse(outputs, targets):
    return F.mse_loss(outputs, targets.flatten(0, 1))


def over_window(outputs, targets):
    """No mean over steps: normalised over the window, as advantages are."""
    return ((outputs - targets) / targets.std()).square().mean()


def real(batch_first=False, resets=False):
    starts = None
    if resets:
        starts = torch.zeros(STEPS, ROWS, dtype=torch.bool)
        # In the oldest level, at a cut, inside a level, at the first loss, between losses.
        starts[1, 0] = starts[4, 1] = starts[6, 2] = starts[9, 2] = starts[11, 1] = True
    return Segment(torch.randn(STEPS, ROWS, INPUTS), torch.randn(STEPS, ROWS, OUT), starts)


def words(masked=False):
    x, y = torch.randint(7, (STEPS, ROWS)), torch.randint(7, (STEPS, ROWS))
    if masked:
        y[torch.rand(STEPS, ROWS) < 0.5] = -100
        y[-2] = -100
        y[-1, 0] = 3
    return Segment(x, y)


CASES = {
    "rnn": (lambda: nn.RNN(INPUTS, OUT), F.mse_loss, real),
    "rnn-2": (lambda: nn.RNN(INPUTS, OUT, 2), F.mse_loss, real),
    "gru": (lambda: nn.GRU(INPUTS, OUT), F.mse_loss, real),
    "gru-2": (lambda: nn.GRU(INPUTS, OUT, 2), F.mse_loss, real),
    "lstm": (lambda: nn.LSTM(INPUTS, OUT), F.mse_loss, real),
    "lstm-2": (lambda: nn.LSTM(INPUTS, OUT, 2), F.mse_loss, real),
    "lstm-batch-first": (lambda: nn.LSTM(INPUTS, OUT, 2, batch_first=True), F.mse_loss, real),
    "gru-resets": (lambda: nn.GRU(INPUTS, OUT), F.mse_loss, lambda: real(resets=True)),
    "gru-cell": (lambda: nn.GRUCell(INPUTS, OUT), F.mse_loss, real),
    "lstm-cell": (lambda: nn.LSTMCell(INPUTS, OUT), F.mse_loss, real),
    "core-head": (lambda: CoreHead(nn.LSTM(INPUTS, 4, 2), 4), F.mse_loss, real),
    "stack": (Stack, F.mse_loss, real),
    "stack-resets": (Stack, F.mse_loss, lambda: real(resets=True)),
    "dict": (DictState, flat_mse, real),
    "dict-resets": (DictState, flat_mse, lambda: real(resets=True)),
    "complex": (Rotating, F.mse_loss, real),
    "complex-resets": (Rotating, F.mse_loss, lambda: real(resets=True)),
    "loop": (Looped, F.mse_loss, real),
    "in-place": (lambda: Looped(in_place=True), F.mse_loss, real),
    "learned-start": (Learned, F.mse_loss, lambda: real(resets=True)),
    "words": (Words, Masked(), words),
    "masked": (Words, Masked(), lambda: words(masked=True)),
    "tied": (lambda: Words(tied=True), Masked(), lambda: words(masked=True)),
    "sparse": (lambda: Words(sparse=True), Masked(), words),
    "sparse-tied": (lambda: Words(tied=True, sparse=True), Masked(), words),
    "over-window": (lambda: nn.GRU(INPUTS, OUT), over_window, real),
}


def case(name):
    make, loss_fn, data = CASES[name]
    objective, segment = at.model.Objective.of(make(), loss_fn), data()
    return objective, segment, list(trained_parameters(objective).values())


def start_of(objective, segment):
    """A state that is not the initial one: the model was run over other inputs before."""
    before = Segment(segment.inputs.flip(0), segment.targets)
    return advance(objective.recurrent, before, None)


def by_windows(objective, segment, state, parameters, contexts=CONTEXTS):
    """The gradient of the window with each context, by plain autograd through the whole of it."""
    found = []
    for context in contexts:
        start = contexts[-1] - context
        entering = (
            advance(objective.recurrent, segment.between(0, start), state) if start else state
        )
        window = segment.between(start, segment.steps)
        loss = window_forward(objective, window, entering, context).loss
        found.append(torch.autograd.grad(loss, parameters, allow_unused=True))
    return found


def dense(gradient, parameters):
    return [
        torch.zeros_like(p) if g is None else g.to_dense()
        for g, p in zip(gradient, parameters, strict=True)
    ]


def assert_equal(levels, expected, parameters, tolerance=1e-12):
    for level, whole in enumerate(expected):
        pairs = zip(dense(levels.up_to(level), parameters), dense(whole, parameters), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("held", [400, 5], ids=["held", "run-again"])
@pytest.mark.parametrize("name", CASES)
def test_levels_add_up_to_the_gradient_of_every_window(name, held):
    objective, segment, parameters = case(name)
    state = start_of(objective, segment)
    before = copy.deepcopy(state)
    found = level_gradients(objective, segment, state, CONTEXTS, parameters, held_steps=held)
    expected = by_windows(objective, segment, state, parameters)
    assert_equal(found, expected, parameters)
    assert found.reached
    # Every level adds something, or the test would show nothing of it.
    for level in found.gradients:
        assert sum(float(g.to_dense().abs().sum()) for g in level if g is not None) > 1e-9
    for a, b in zip(at.data.nest.leaves(state), at.data.nest.leaves(before), strict=True):
        assert torch.equal(a, b)
    targets = segment.targets[-LOSSES:]
    assert found.count == (int((targets != -100).sum()) if targets.dtype == torch.long else 12)


@pytest.mark.parametrize("name", ["gru", "lstm-2", "learned-start", "stack", "dict", "in-place"])
def test_from_the_initial_state_as_well(name):
    objective, segment, parameters = case(name)
    found = level_gradients(objective, segment, None, CONTEXTS, parameters)
    assert_equal(found, by_windows(objective, segment, None, parameters), parameters)


@pytest.mark.parametrize("name", ["gru", "lstm-batch-first", "masked", "complex"])
def test_a_loss_is_that_of_the_window(name):
    objective, segment, parameters = case(name)
    state = start_of(objective, segment)
    found = level_gradients(objective, segment, state, CONTEXTS, parameters)
    loss = window_forward(objective, segment, state, CONTEXTS[-1]).loss
    torch.testing.assert_close(found.loss, loss.detach(), rtol=1e-12, atol=0)
    assert not found.loss.requires_grad


def test_levels_are_what_the_definition_by_lag_gives():
    """Every step with parameters of its own: no detaching anywhere (Eq. backprop)."""
    model = CoreHead(nn.GRU(INPUTS, 4), 4)
    segment = real()
    table = lag_gradients(
        model, lambda out, s: F.mse_loss(out, segment.targets[s : s + 1]), segment.inputs
    )
    objective = at.model.Objective.of(model, F.mse_loss)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = level_gradients(objective, segment, None, CONTEXTS, parameters)
    last = CONTEXTS[-1]
    for level, context in enumerate(CONTEXTS):
        expected = window_gradient(table, last - context, last, STEPS)
        for name, ours in zip(names, found.up_to(level), strict=True):
            torch.testing.assert_close(ours, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("held", [400, 5])
def test_all_levels_see_the_same_dropout(held):
    """One graph over the same parts, drawn from the same seed, and cut by hand."""
    model = Dropped().train()
    objective, segment = at.model.Objective.of(model, F.mse_loss), real()
    parameters = list(model.parameters())
    state = objective.recurrent.initial_state(segment.inputs)
    torch.manual_seed(5)
    found = level_gradients(objective, segment, state, CONTEXTS, parameters, held_steps=held)
    after = torch.get_rng_state()
    edges = [CONTEXTS[-1] - c for c in reversed(CONTEXTS)]
    expected = []
    for context in CONTEXTS:
        torch.manual_seed(5)
        carried = state
        for a, b in pairwise([*edges, STEPS]):
            if a == CONTEXTS[-1] - context:
                carried = at.data.nest.detach(carried)
            features, carried = model.core(segment.inputs[a:b], carried)
        loss = F.mse_loss(model.head(features), segment.targets[CONTEXTS[-1] :])
        expected.append(torch.autograd.grad(loss, parameters))
    assert_equal(found, expected, parameters)
    # What is drawn next does not repeat what was drawn here: segments stay independent.
    assert torch.equal(after, torch.get_rng_state())


def test_frozen_parameters_are_left_out_and_do_not_stop_the_gradient():
    torch.manual_seed(1)
    free = CoreHead(nn.LSTM(INPUTS, 4, 2), 4)
    frozen = copy.deepcopy(free)
    kept = [n for n, _ in free.named_parameters() if "l0" not in n]
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_(name in kept)
    segment = real()
    objectives = [at.model.Objective.of(model, F.mse_loss) for model in (free, frozen)]
    state = start_of(objectives[0], segment)
    named = dict(free.named_parameters())
    assert [n.partition(".")[2] for n in trained_parameters(objectives[1])] == kept
    ours = level_gradients(
        objectives[1], segment, state, CONTEXTS, list(trained_parameters(objectives[1]).values())
    )
    wanted = [named[n] for n in kept]
    assert_equal(ours, by_windows(objectives[0], segment, state, wanted), wanted)


def test_with_nothing_but_a_readout_to_train_every_level_but_the_first_is_empty():
    model = CoreHead(nn.GRU(INPUTS, 4), 4)
    model.layer.requires_grad_(False)
    objective, segment = at.model.Objective.of(model, F.mse_loss), real()
    parameters = list(trained_parameters(objective).values())
    found = level_gradients(objective, segment, None, CONTEXTS, parameters)
    assert all(g is None for level in found.gradients[1:] for g in level)
    assert_equal(found, by_windows(objective, segment, None, parameters), parameters)


def test_a_window_without_a_loss_has_a_gradient_of_zero():
    objective, segment, parameters = case("masked")
    segment.targets[-LOSSES:] = -100
    found = level_gradients(objective, segment, None, CONTEXTS, parameters)
    assert (found.count, float(found.loss)) == (0.0, 0.0)
    for level in found.gradients:
        assert all(g is None or not g.any() for g in level)
    assert not found.reached


def test_a_tail_of_masked_losses_is_not_scored():
    objective, segment, parameters = case("masked")
    segment.targets[-2:] = -100
    found = level_gradients(objective, segment, None, CONTEXTS, parameters)
    shorter = Segment(segment.inputs[:-2], segment.targets[:-2])
    expected = by_windows(objective, shorter, None, parameters)
    assert_equal(found, expected, parameters)


@pytest.mark.parametrize("name", ["gru", "gru-cell", "loop", "core-head"])
def test_under_autocast_levels_are_those_of_the_window_up_to_rounding(name):
    objective, segment, parameters = case(name)
    plain = level_gradients(objective, segment, None, CONTEXTS, parameters)
    objective.recurrent.module.float()
    segment = Segment(segment.inputs.float(), segment.targets.float())
    with torch.autocast("cpu", torch.bfloat16):
        cast = level_gradients(objective, segment, None, CONTEXTS, parameters)
        expected = by_windows(objective, segment, None, parameters)
    epsilon = torch.finfo(torch.bfloat16).eps
    for level in range(len(CONTEXTS)):
        ours, theirs, exact = (
            torch.cat([g.double().flatten() for g in dense(gradient, parameters)])
            for gradient in (cast.up_to(level), expected[level], plain.up_to(level))
        )
        assert (ours - theirs).norm() <= 8 * epsilon * theirs.norm()
        assert (ours - exact).norm() <= 8 * epsilon * exact.norm()
    assert torch.is_autocast_enabled("cpu") is False


class ExactReadout(nn.Module):
    """Its readout is kept out of autocast, forward and so backward."""

    def __init__(self):
        super().__init__()
        self.gru, self.readout = nn.GRU(INPUTS, 8), nn.Linear(8, OUT)

    def core(self, x, state):
        return self.gru(x, state)

    def head(self, features):
        with torch.autocast("cpu", enabled=False):
            return self.readout(features.float())


def test_the_backward_pass_is_not_cast():
    model = ExactReadout().float()
    objective = at.model.Objective.of(model, F.mse_loss)
    segment = Segment(*(part.float() for part in real()[:2]))
    parameters = list(model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        found = level_gradients(objective, segment, None, (0,), parameters)
        loss = window_forward(objective, segment, None, 0).loss
    expected = torch.autograd.grad(loss, parameters)  # outside, as torch advises
    for ours, theirs in zip(found.gradients[0], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def test_a_state_without_gradient_is_said_not_to_be_reached():
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(INPUTS, OUT)

        def forward(self, x, state):
            return self.gru(x, None if state is None else state.detach())

    objective, segment = at.model.Objective.of(Cut(), F.mse_loss), real()
    parameters = list(objective.recurrent.module.parameters())
    found = level_gradients(objective, segment, torch.zeros(1, ROWS, OUT), CONTEXTS, parameters)
    assert not found.reached
    assert all(g is None for level in found.gradients[1:] for g in level)


@pytest.mark.parametrize("contexts", [(), (1, 2), (0, 2, 2), (0, 4, 1)])
def test_contexts_ascend_from_zero(contexts):
    objective, segment, parameters = case("gru")
    with pytest.raises(ValueError, match="contexts must ascend from 0"):
        level_gradients(objective, segment, None, contexts, parameters)
    with pytest.raises(ValueError, match="contexts must ascend from 0"):
        at.measure.LevelRequest(contexts)


def test_a_context_must_leave_a_loss():
    objective, segment, parameters = case("gru")
    with pytest.raises(ValueError, match="13 steps leaves no loss after 13 steps"):
        level_gradients(objective, segment, None, (0, 13), parameters)


def test_run_again_holds_one_part_at_a_time():
    """The graph of a part is gone once its level is known: memory does not grow with the steps."""
    objective, segment, parameters = case("loop")
    model = objective.recurrent.module
    forward, seen, most = model.forward, [], []

    def watched(x, state):
        outputs, state = forward(x, state)
        if torch.is_grad_enabled():
            seen.append((len(x), weakref.ref(outputs)))
            most.append(sum(reference() is not None for _, reference in seen))
        return outputs, state

    model.forward = watched
    level_gradients(objective, segment, None, CONTEXTS, parameters, held_steps=5)
    # With gradient: the losses first, then each older part as its turn comes.
    assert [steps for steps, _ in seen] == [4, 1, 1, 3, 4]
    assert max(most) == 1
    seen.clear()
    most.clear()
    level_gradients(objective, segment, None, CONTEXTS, parameters)
    assert [steps for steps, _ in seen] == [4, 3, 1, 1, 4]
    assert max(most) == 5
    assert all(reference() is None for _, reference in seen)


class Busy(nn.Module):
    """Dropout, and a buffer that every forward pass changes and replaces."""

    def __init__(self):
        super().__init__()
        self.lstm, self.drop = nn.LSTM(INPUTS, OUT, 2, dropout=0.5), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, state):
        self.calls += 1
        self.calls = self.calls + 1
        out, state = self.lstm(self.drop(x), state)
        return out, state


class CountingLoss(nn.Module):
    """Counts its calls in a buffer, and has a parameter."""

    def __init__(self, fails=False):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.scale, self.fails = nn.Parameter(torch.ones(())), fails

    def forward(self, out, target):
        self.calls += 1
        if self.fails and self.calls > 2:
            raise ZeroDivisionError
        return F.mse_loss(out * self.scale, target)


@pytest.mark.parametrize("fails", [False, True])
def test_a_measurement_leaves_everything_as_it_was(fails):
    model, loss = Busy(), CountingLoss(fails)
    model.drop.eval()
    for p in (*model.parameters(), *loss.parameters()):
        p.grad = torch.full_like(p, 3.0)
    both = nn.ModuleList([model, loss])
    before = {name: t.clone() for name, t in both.state_dict().items()}
    objective, buffer = at.model.Objective.of(model, loss), model.calls
    stream = at.SequenceStream(torch.randn(60, ROWS, INPUTS), torch.randn(60, ROWS, OUT))
    source = at.measure.Source(objective, stream, 5, torch.Generator().manual_seed(0), train=True)
    request = at.measure.LevelRequest(CONTEXTS, LOSSES, segments=4)
    random = torch.get_rng_state()
    if fails:
        with pytest.raises(ZeroDivisionError):
            request.measure(source)
    else:
        sums = request.measure(source)
        assert (sums.samples, sums.unreached) == (4 * LOSSES * ROWS, ())
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert not model.drop.training
    assert model.calls is buffer
    assert all(torch.equal(t, before[name]) for name, t in both.state_dict().items())
    assert all((p.grad == 3.0).all() for p in both.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in both.modules())
    assert stream.cursor == 0
    assert torch.is_grad_enabled()


def test_it_measures_under_no_grad_and_refuses_inference_mode():
    objective = at.model.Objective.of(nn.GRU(INPUTS, OUT), F.mse_loss)
    stream = at.SequenceStream(torch.randn(60, ROWS, INPUTS), torch.randn(60, ROWS, OUT))
    request = at.measure.LevelRequest(CONTEXTS, LOSSES, segments=2)

    def measure():
        source = at.measure.Source(objective, stream, 5, torch.Generator().manual_seed(0))
        return request.measure(source).vectors

    plain = measure()
    with torch.no_grad():
        np.testing.assert_array_equal(measure(), plain)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="measure outside of it"):
        measure()


def test_batch_normalisation_in_training_mode_is_refused():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.norm = nn.GRU(INPUTS, OUT), nn.BatchNorm1d(OUT)

        def forward(self, x, state):
            h, state = self.gru(x, state)
            return self.norm(h.flatten(0, 1)).view_as(h), state

    stream = at.SequenceStream(torch.randn(60, ROWS, INPUTS), torch.randn(60, ROWS, OUT))
    request = at.measure.LevelRequest(CONTEXTS, LOSSES, segments=2)
    objective = at.model.Objective.of(Normed(), F.mse_loss)
    source = at.measure.Source(objective, stream, 5, torch.Generator())
    with pytest.raises(ValueError, match="'norm' is batch normalisation in training mode"):
        request.measure(source)
    objective.recurrent.module.eval()
    assert request.measure(source).samples == 2 * LOSSES * ROWS


def test_pieces_are_cut_at_resets_alone():
    """The segments of the tests above do cut parts in two; without that they show nothing."""
    objective, segment, _ = case("stack-resets")
    pieces = list(run_pieces(objective.recurrent, segment, None))
    assert [p.start for p in pieces] == [0, 1, 4, 6, 9, 11]
