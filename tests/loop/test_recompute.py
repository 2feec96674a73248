"""A window that runs again in the backward pass has the gradient of one that is held."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at
from adaptive_tbptt.loop import window_pass

from ..elsewhere import other_device
from ..oracle import CoreHead, DictState

STEPS, ROWS, INPUTS, OUT = 60, 3, 3, 2


class Cell(nn.Module):
    """Steps one by one."""

    def __init__(self, drop=0.0):
        super().__init__()
        self.cell, self.drop = nn.GRUCell(INPUTS, OUT), nn.Dropout(drop)

    def forward(self, x, state):
        state = x.new_zeros(x.shape[1], OUT) if state is None else state
        outputs = []
        for xt in x:
            state = self.drop(self.cell(xt, state))
            outputs.append(state)
        return torch.stack(outputs), state


def data(batch_first=False):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, ROWS, INPUTS + OUT, generator=generator)
    resets = torch.zeros(STEPS, ROWS, dtype=torch.bool)
    resets[11, 0] = resets[34, 2] = True
    return at.SequenceStream(x[..., :INPUTS], x[..., INPUTS:], resets)


def train(model, recompute, controller=None, loss_fn=F.mse_loss, **options):
    """Train for an epoch; return losses, parameters and the next random number."""
    model = copy.deepcopy(model)
    torch.manual_seed(2)
    controller = at.FixedTruncation(20) if controller is None else controller
    tbptt = at.AdaptiveTBPTT(model, loss_fn, controller, losses=15, recompute=recompute)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for window in tbptt.windows(data()):
        losses.append(window.backward(**options))
        optimizer.step()
        optimizer.zero_grad()
    return [torch.stack(losses), *model.parameters(), *model.buffers(), torch.rand(1)]


def assert_equal(ours, theirs):
    """To the bit."""
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def held_instead(monkeypatch):
    """Cut windows all the same, but hold the pieces."""

    def hold(module, call, *args, uncompiled):
        return call(*args)

    monkeypatch.setattr(window_pass, "run_again", hold)


LAYERS = {
    "lstm": lambda: CoreHead(nn.LSTM(INPUTS, 4, 2), 4),
    "bare": lambda: nn.GRU(INPUTS, OUT),
    "cell": Cell,
    "dict": lambda: DictState(INPUTS, 4, OUT),
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("controller", [at.FixedTruncation(20), at.Unbiased(k_max=24)])
def test_cuts_change_the_gradient_by_rounding_alone(name, controller):
    def flat(outputs, targets):
        return F.mse_loss(outputs.reshape(-1, OUT), targets.flatten(0, 1))

    model = LAYERS[name]()
    held = train(model, None, controller, flat)
    for recompute in (1, 7, 20):
        for a, b in zip(train(model, recompute, controller, flat), held, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
    assert_equal(train(model, 1000, controller, flat), held)  # nothing is cut


@pytest.mark.usefixtures("double")
@pytest.mark.filterwarnings("ignore:loss_fn does not behave like a mean")
def test_a_loss_of_the_whole_window_is_called_once_on_all_of_it():
    def error_to_signal(outputs, targets):
        return (outputs - targets).square().sum() / targets.square().sum()

    model = Cell()  # without core and head
    again, held = (train(model, r, loss_fn=error_to_signal) for r in (7, None))
    for a, b in zip(again, held, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


class Drops(nn.Module):
    """Dropout between layers and behind them: cuts change the order in which masks are drawn."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.LSTM(INPUTS, 6, 2, dropout=0.4), nn.Dropout(0.3)
        self.readout = nn.Linear(6, OUT)

    def core(self, x, state):
        features, state = self.layer(x, state)
        return self.drop(features), state

    def head(self, features):
        return self.drop(self.readout(features))


class Normed(nn.Module):
    """Every call changes a buffer, and what the call returns depends on it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(INPUTS + OUT, OUT))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, state):
        state = x.new_zeros(x.shape[1], OUT) if state is None else state
        self.calls = self.calls + 1
        outputs = []
        for xt in x:
            state = torch.tanh(self.layer(torch.cat([xt, state], -1))) / (1 + 1e-4 * self.calls)
            outputs.append(state)
        return torch.stack(outputs), state


@pytest.mark.filterwarnings("ignore:Normed returns something else when it is called again")
@pytest.mark.parametrize("number", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [Cell, lambda: Cell(0.4), Drops, Normed])
@pytest.mark.parametrize("controller", [at.FixedTruncation(20), at.Unbiased(k_max=24)])
def test_what_runs_again_is_the_same_to_the_bit(number, make, controller, monkeypatch):
    torch.set_default_dtype(number)
    try:
        model = make()
        again = train(model, 7, controller)
        held_instead(monkeypatch)
        assert_equal(again, train(model, 7, controller))
    finally:
        torch.set_default_dtype(torch.float32)


def test_dropout_by_hand():
    model, stream = Drops(), data()
    (x, y, *_), by_hand = stream.segment(0, STEPS), copy.deepcopy(model)
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, STEPS, recompute=25)
    (window,) = tbptt.windows(at.SequenceStream(x, y))
    torch.manual_seed(3)
    loss = window.backward()
    torch.manual_seed(3)
    features, state = [], None
    for a in (0, 25, 50):
        some, state = by_hand.core(x[a : a + 25], state)
        features.append(some)
    whole = F.mse_loss(by_hand.head(torch.cat(features)), y)
    whole.backward()
    assert torch.equal(loss, whole)
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in by_hand.parameters()])


class Scaler:
    def scale(self, loss):
        return loss * 2.0**7


def test_mixed_precision_with_a_scaler(monkeypatch):
    model = Drops()
    found = []
    for hold in (False, True):
        if hold:
            held_instead(monkeypatch)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(train(model, 7, scaler=Scaler(), scale=0.5))
    assert_equal(*found)


def test_the_graph_of_a_loss_works_as_usual():
    model, again = Cell(), 2
    expected = train(model, None)[0][0]
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, 20, losses=15, recompute=4)
    window = next(iter(tbptt.windows(data())))
    loss = window.loss()
    assert torch.equal(loss, expected)
    for _ in range(again):  # a graph that is kept runs again each time
        loss.backward(retain_graph=True)
    sums = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss.backward()
    assert_equal(sums, [again * p.grad for p in model.parameters()])


class Live(nn.Module):
    """Count the products of steps that the graph holds, and the steps that ran."""

    def __init__(self):
        super().__init__()
        self.weight, self.live, self.peak, self.ran = nn.Parameter(torch.ones(OUT)), 0, 0, 0

    def forward(self, x, state):
        state, outputs = x.new_zeros(x.shape[1], OUT) if state is None else state, []
        for xt in x:
            product = self.weight * state
            weakref.finalize(product, self.gone)
            self.live, self.ran = self.live + 1, self.ran + 1
            self.peak = max(self.peak, self.live)
            state = 0.5 * product.square() + xt[:, :OUT]  # square holds the product
            outputs.append(state.sum(-1, keepdim=True))
            del product
        return torch.stack(outputs), state

    def gone(self):
        self.live -= 1


@pytest.mark.parametrize(("recompute", "peak", "ran"), [(None, 60, 60), (6, 6, 114)])
def test_memory_holds_a_piece_at_a_time(recompute, peak, ran):
    x, y = torch.rand(STEPS, ROWS, INPUTS), torch.rand(STEPS, ROWS, 1)
    model, stream = Live(), at.SequenceStream(x, y)
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, STEPS, recompute=recompute)
    tbptt.recurrent.dims(x)  # a few steps, once
    (window,) = tbptt.windows(stream)
    model.live = model.peak = model.ran = 0
    window.backward()
    assert model.live == 0
    assert model.peak == peak
    assert model.ran == ran  # all pieces but the last run twice


class Leaky(nn.Module):
    """A recurrence that compiles quickly."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(INPUTS, OUT)

    def forward(self, x, state):
        x = self.enter(x)
        state = torch.zeros_like(x[0]) if state is None else state
        outputs = []
        for xt in x.unbind(0):
            state = torch.tanh(0.5 * state + xt)
            outputs.append(state)
        return torch.stack(outputs), state


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_runs_again_as_it_ran(monkeypatch):
    # The first window has less context than the others, so it runs uncompiled, both times.
    model = torch.compile(Leaky(), backend="aot_eager")
    again = train(model, 5)
    held_instead(monkeypatch)
    assert_equal(again, train(model, 5))
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_another_device():
    found = []
    for recompute in (None, 7):
        with other_device() as device:
            torch.manual_seed(0)
            found.append(train(Cell().to(device), recompute))
    assert_equal([x.cpu() for x in found[1]], [x.cpu() for x in found[0]])


@pytest.mark.parametrize("recompute", [True, 2.5, "sqrt"])
def test_steps_to_hold_are_a_whole_number(recompute):
    with pytest.raises(TypeError, match="the most steps of a window to hold in memory"):
        at.AdaptiveTBPTT(nn.GRU(3, 2), F.mse_loss, 5, recompute=recompute)


def test_no_steps_cannot_be_held():
    with pytest.raises(ValueError, match="recompute must be at least 1 step, got 0"):
        at.AdaptiveTBPTT(nn.GRU(3, 2), F.mse_loss, 5, recompute=0)
