"""Recurrences of one's own: a gated linear one in closed form, and kernels that drop gradients."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at

from ..oracle import lag_gradients, window_gradient

pytestmark = pytest.mark.usefixtures("double")
STEPS, ROWS, INPUTS, HIDDEN = 30, 3, 2, 5


def load_example():
    path = Path(__file__).parents[2] / "examples" / "gated_linear_recurrence.py"
    spec = importlib.util.spec_from_file_location("gated_linear_recurrence", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()


def data():
    return torch.randn(STEPS, ROWS, INPUTS), torch.randn(STEPS, ROWS, 1)


def test_the_scan_is_the_loop_and_may_be_cut_anywhere():
    model, (x, _) = example.MinGRU(INPUTS, HIDDEN, 1), data()
    start = torch.randn(ROWS, HIDDEN)
    h, by_hand = start, []
    for xt in x:
        z = torch.sigmoid(model.gate(xt))
        h = (1 - z) * h + z * model.candidate(xt)
        by_hand.append(h)
    features, last = model.core(x, start)
    torch.testing.assert_close(features, torch.stack(by_hand))
    torch.testing.assert_close(last, h)
    for cut in (1, 7, STEPS - 1):
        first, state = model.core(x[:cut], start)
        second, _ = model.core(x[cut:], state)
        torch.testing.assert_close(torch.cat([first, second]), features)


class Stacked(nn.Module):
    """Cells on top of each other; `fills` writes into the list it was handed, as many do."""

    def __init__(self, fills):
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(INPUTS, HIDDEN), nn.GRUCell(HIDDEN, 1)])
        self.fills = fills

    def forward(self, x, state):
        if state is None:
            state = [x.new_zeros(x.shape[1], cell.hidden_size) for cell in self.cells]
        state, outputs = state if self.fills else list(state), []
        for xt in x:
            for i, cell in enumerate(self.cells):
                state[i] = xt = cell(xt, state[i])
            outputs.append(xt)
        return torch.stack(outputs), state


def test_a_state_that_is_filled_in_place_is_measured_and_reset_all_the_same():
    (x, y), found = data(), []
    resets = torch.zeros(STEPS, ROWS, dtype=torch.bool)
    resets[9, 1] = resets[20, 2] = True
    for fills in (False, True):
        torch.manual_seed(0)
        model = Stacked(fills)
        stream = at.SequenceStream(x, y, resets=resets)
        norms = at.probe(model, F.mse_loss, x, y, resets=resets, burn_in=5).state_norms
        windows = at.AdaptiveTBPTT(model, F.mse_loss, at.FixedTruncation(4)).windows(stream)
        losses = [float(window.backward()) for window in windows]
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        found.append([*norms.ravel(), *losses, *gradient, at.evaluate(model, F.mse_loss, stream)])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-12)


@pytest.mark.parametrize("burn_in", [0, 10])
def test_phi_is_the_product_of_the_gates(burn_in):
    model, (x, y) = example.MinGRU(INPUTS, HIDDEN, 1), data()
    profile = at.probe(model, F.mse_loss, x, y, burn_in=burn_in)
    with torch.no_grad():
        features, _ = model.core(x, None)
        error = model.head(features[-1]) - y[-1]
        at_readout = 2 * error * model.readout.weight  # of (output - target)^2
        keep = 1 - torch.sigmoid(model.gate(x[burn_in:]))
    # Lag k: every unit's gradient times its gates of the last k steps.
    products = torch.cumprod(torch.cat([torch.ones(1, ROWS, HIDDEN), keep.flip(0)]), dim=0)
    expected = (products * at_readout).norm(dim=-1)
    np.testing.assert_allclose(profile.state_norms, expected, rtol=1e-12)


def test_windows_of_the_scan_have_the_gradient_of_the_definition():
    model, (x, y) = example.MinGRU(INPUTS, HIDDEN, 1), data()

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x, state):
            features, state = self.inner.core(x, state)
            return self.inner.head(features), state

    x, y = x[:8], y[:8]
    table = lag_gradients(Whole(), lambda out, s: F.mse_loss(out, y[s : s + 1]), x)
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, at.FixedTruncation(3), losses=2)
    for window in tbptt.windows(at.SequenceStream(x, y)):
        window.backward()
        for name, g in window_gradient(table, window.start, window.first, window.stop).items():
            torch.testing.assert_close(model.get_parameter(name.removeprefix("inner.")).grad, g)
        model.zero_grad()


class Kernel(torch.autograd.Function):
    """c_t = 0.5 c_{t-1} + x_t and h_t = tanh(0.5 h_{t-1} + c_t), with gradients as asked."""

    @staticmethod
    def forward(ctx, x, h, c, gives):
        ctx.gives = gives
        c = 0.5 * c + x
        h = torch.tanh(0.5 * h + c)
        ctx.save_for_backward(h)
        return h, c

    @staticmethod
    def backward(ctx, gh, gc):
        (h,) = ctx.saved_tensors
        inside = gh * (1 - h**2)
        whole = inside + gc
        to_h = 0.5 * inside if "h" in ctx.gives else None
        to_c = 0.5 * whole if "c" in ctx.gives else None
        return whole, to_h, to_c, None


class Custom(nn.Module):
    """A model around the kernel, with whatever else its state holds."""

    def __init__(self, gives="hc", detach="", extra=None):
        super().__init__()
        self.encode, self.gives, self.detach = nn.Linear(INPUTS, HIDDEN), gives, detach
        self.extra, self.drop = extra, nn.Dropout(0.5)
        self.position = nn.Embedding(100, HIDDEN)

    def forward(self, x, state):
        if state is None:
            zero = x.new_zeros(x.shape[1], HIDDEN)
            state = {"h": zero, "c": zero}
            if self.extra:
                state[self.extra] = x.new_zeros(x.shape[1], 1)
        state, seen = dict(state), []
        for xt in x:
            drive = self.drop(self.encode(xt))
            if self.extra == "counter":
                drive = drive + self.position(state["counter"][:, 0].long() % 100)
                state["counter"] = state["counter"] + 1
            if self.extra == "statistic":  # kept for a person to look at
                size = drive.detach().norm(dim=-1, keepdim=True)
                state["statistic"] = 0.9 * state["statistic"] + 0.1 * size
            h, c = (
                state[name].detach() if name in self.detach else state[name] for name in ("h", "c")
            )
            state["h"], state["c"] = Kernel.apply(drive, h, c, self.gives)
            seen.append(state["h"])
        return torch.stack(seen), state


def probe(model):
    torch.manual_seed(3)
    x = torch.randn(STEPS, ROWS, INPUTS)
    return at.probe(model, F.mse_loss, x, torch.randn(STEPS, ROWS, HIDDEN), burn_in=5)


DROPPED = [{"gives": ""}, {"detach": "hc"}]


@pytest.mark.parametrize("how", DROPPED)
def test_a_kernel_without_a_gradient_for_its_state_is_refused(how):
    with pytest.raises(ValueError, match="a kernel drops the gradient of the state"):
        probe(Custom(**how))
    stream = at.SequenceStream(torch.randn(60, ROWS, INPUTS), torch.randn(60, ROWS, HIDDEN))
    controller = at.BiasTolerance(delta=0.1, lags=20, gauge=at.truncate.PaperGauge())
    tbptt = at.AdaptiveTBPTT(Custom(**how), F.mse_loss, controller, burn_in=5)
    with (
        pytest.warns(UserWarning, match="no gradient reaches 'h' of the state that is passed"),
        pytest.raises(ValueError, match="a kernel drops the gradient of the state"),
    ):
        next(iter(tbptt.windows(stream)))


@pytest.mark.parametrize("how", [{"gives": "h"}, {"detach": "c"}])
def test_a_part_that_matters_and_gets_no_gradient_is_named(how):
    with pytest.warns(UserWarning, match="no gradient reaches 'c' of the state") as caught:
        profile = probe(Custom(**how))
    assert len(caught) == 1
    assert not profile.component_norms["c"][1:].any()
    assert profile.component_norms["h"][1:].all()


def test_the_other_part_is_named_as_well():
    with pytest.warns(UserWarning, match="no gradient reaches 'h' of the state"):
        probe(Custom(gives="c"))


@pytest.mark.parametrize("extra", [None, "counter", "statistic"])
@pytest.mark.parametrize("train", [False, True])
def test_there_is_no_false_alarm(extra, train):
    # Warnings are errors here. Dropout draws the same mask twice, so it is not taken for a change.
    profile = probe(Custom(extra=extra).train(train))
    assert profile.component_norms["c"][1:].all()


def test_what_flows_through_the_dropped_part_is_really_missing():
    with pytest.warns(UserWarning, match="'c' of the state"):
        dropped = probe(Custom(gives="h").eval())
    torch.manual_seed(0)
    whole = probe(Custom().eval())
    assert not np.allclose(dropped.mean, whole.mean, rtol=0.01)
