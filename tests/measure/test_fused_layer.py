"""The fast path equals the general one, and is not taken where it would not."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at
from adaptive_tbptt.measure import fused_layer, lag_probe
from adaptive_tbptt.measure.fused_layer import LayerPass, ProbePlan

from ..oracle import CoreHead, DictState

pytestmark = pytest.mark.usefixtures("double")
STEPS, ROWS = 12, 5
GENERAL = at.measure.ProbeSettings(fused=False)


class Encoded(nn.Module):
    """Embedding and dropout before the layer, dropout and a readout behind it."""

    def __init__(self, layer):
        super().__init__()
        self.embedding, self.drop = nn.Embedding(7, 3), nn.Dropout(0.3)
        self.layer, self.out = layer, nn.Linear(4, 4)

    def core(self, x, state):
        return self.layer(self.drop(self.embedding(x)), state)

    def head(self, h):
        return self.out(self.drop(h))

    def forward(self, x, state):
        h, state = self.core(x, state)
        return self.head(h), state


LAYERS = {
    "rnn": lambda: nn.RNN(3, 4),
    "rnn-relu-3": lambda: nn.RNN(3, 4, 3, nonlinearity="relu"),
    "gru": lambda: nn.GRU(3, 4),
    "gru-2": lambda: nn.GRU(3, 4, 2),
    "gru-no-bias": lambda: nn.GRU(3, 4, bias=False),
    "lstm": lambda: nn.LSTM(3, 4),
    "lstm-3": lambda: nn.LSTM(3, 4, 3),
    "lstm-no-bias": lambda: nn.LSTM(3, 4, bias=False),
    "lstm-proj": lambda: nn.LSTM(3, 6, 2, proj_size=4),
    "lstm-batch-first": lambda: nn.LSTM(3, 4, 2, batch_first=True),
}


def both(model, x, y, **options):
    fast = at.probe(model, F.mse_loss, x, y, **options)
    slow = at.probe(model, F.mse_loss, x, y, settings=GENERAL, **options)
    return fast, slow


def assert_same(fast, slow, rtol=1e-10):
    np.testing.assert_allclose(fast.state_norms, slow.state_norms, rtol=rtol)
    np.testing.assert_allclose(
        fast.cumulative_gradient, slow.cumulative_gradient, rtol=rtol, atol=1e-14
    )
    assert list(fast.component_norms) == list(slow.component_norms)
    for name, norms in slow.component_norms.items():
        np.testing.assert_allclose(fast.component_norms[name], norms, rtol=rtol)


def is_fused(model, x):
    recurrent = at.model.as_recurrent(model)
    return ProbePlan().layer(recurrent, x, recurrent.initial_state(x)) is not None


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("burn_in", [0, 3])
def test_layers_take_the_fast_path_and_it_is_the_same(name, burn_in):
    model = LAYERS[name]()
    shape = (ROWS, STEPS) if model.batch_first else (STEPS, ROWS)
    fast, slow = both(model, torch.randn(*shape, 3), torch.randn(*shape, 4), burn_in=burn_in)
    assert_same(fast, slow)
    assert is_fused(model, torch.randn(STEPS, ROWS, 3))


@pytest.mark.parametrize("name", ["rnn", "gru-2", "lstm-3"])
@pytest.mark.parametrize("wrap", [Encoded, lambda layer: CoreHead(layer, 4, 4)])
def test_models_around_a_layer_take_it_too(name, wrap):
    model = wrap(LAYERS[name]()).eval()
    x = torch.randint(7, (STEPS, ROWS)) if wrap is Encoded else torch.randn(STEPS, ROWS, 3)
    assert_same(*both(model, x, torch.randn(STEPS, ROWS, 4)))
    assert is_fused(model, x)


def test_float32_agrees_to_float32():
    model = LAYERS["lstm-3"]().float()
    x, y = torch.randn(60, ROWS, 3).float(), torch.randn(60, ROWS, 4).float()
    assert_same(*both(model, x, y), rtol=1e-3)


class Changed(nn.Module):
    """Does something to the state that the layer does not know of."""

    def __init__(self, layer, change):
        super().__init__()
        self.layer, self.change = layer, change

    def forward(self, x, state):
        outputs = []
        for xt in x:
            out, state = self.layer(*self.change(xt[None], state))
            outputs.append(out)
        return torch.cat(outputs), state


def scaled(x, state):
    return x, None if state is None else 0.9 * state


def fed_back(x, state):
    return (x if state is None else x + state.mean(-1, keepdim=True)), state


@pytest.mark.parametrize("change", [scaled, fed_back])
def test_a_model_that_touches_the_state_is_not_fused(change):
    model = Changed(nn.GRU(3, 4), change)
    x = torch.randn(STEPS, ROWS, 3)
    assert not is_fused(model, x)
    assert_same(*both(model, x, torch.randn(STEPS, ROWS, 4)))


def test_other_modules_are_not_fused():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.RNN(3, 4), nn.RNN(4, 4)

        def forward(self, x, state):
            first, second = (None, None) if state is None else state
            h, first = self.a(x, first)
            h, second = self.b(h, second)
            return h, (first, second)

    x = torch.randn(STEPS, ROWS, 3)
    for model in (Two(), DictState(), nn.LSTMCell(3, 4)):
        assert not is_fused(model, x)


def test_resets_take_the_general_path_and_none_of_them_the_fast_one():
    model, x, y = nn.LSTM(3, 4), torch.randn(STEPS, ROWS, 3), torch.randn(STEPS, ROWS, 4)
    resets = torch.zeros(STEPS, ROWS, dtype=torch.bool)
    plain = at.probe(model, F.mse_loss, x, y)
    np.testing.assert_allclose(
        at.probe(model, F.mse_loss, x, y, resets=resets).state_norms, plain.state_norms, rtol=1e-10
    )
    resets[5] = True
    cut = at.probe(model, F.mse_loss, x, y, resets=resets)
    assert (cut.state_norms[STEPS - 4 :] == 0).all()


@pytest.mark.parametrize("name", LAYERS)
def test_sequences_that_start_inside_the_window_take_the_fast_path_too(name, monkeypatch):
    model = LAYERS[name]()
    shape = (ROWS, STEPS) if model.batch_first else (STEPS, ROWS)
    resets = torch.zeros(STEPS, ROWS, dtype=torch.bool)
    resets[2, 0] = resets[2, 1] = resets[10, 1] = resets[6, 2] = resets[0, 2] = True
    resets = resets.t() if model.batch_first else resets
    x, y = torch.randn(*shape, 3), torch.randn(*shape, 4)
    slow = at.probe(model, F.mse_loss, x, y, resets=resets, settings=GENERAL)

    def refuse(*arguments):
        raise AssertionError("the general path was taken")

    monkeypatch.setattr(lag_probe, "StepPass", refuse)
    fast = at.probe(model, F.mse_loss, x, y, resets=resets)
    assert_same(fast, slow)
    # Row 1 starts at step 10: nothing reaches beyond the step that its last loss follows.
    assert not fast.state_norms[2:, 1].any()
    assert fast.state_norms[:2, 1].all()


def test_dropout_between_layers_keeps_its_mask_on_the_way_back():
    layer = nn.LSTM(3, 8, 2, dropout=0.5).train()
    x = torch.randn(STEPS, ROWS, 3)
    start = tuple(torch.zeros(2, ROWS, 8) for _ in range(2))
    with torch.no_grad():
        ours = LayerPass(layer, x, start)
    mask = ours.masks[1]
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    given = [torch.randn(2, ROWS, 8) for _ in range(2)]
    mine = ours.backward(given)
    low, high = nn.LSTM(3, 8), nn.LSTM(8, 8)
    for index, part in enumerate((low, high)):
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(part, f"{name}_l0").data = getattr(layer, f"{name}_l{index}").data
    entering = [[torch.zeros(1, ROWS, 8, requires_grad=True) for _ in range(4)]]
    states = entering[0]
    for t in range(STEPS):
        states = [s.view_as(s) for s in states]
        entering.append(states)
        out, (h1, c1) = low(x[t : t + 1], (states[0], states[1]))
        _, (h2, c2) = high(out * mask[t : t + 1], (states[2], states[3]))
        states = [h1, c1, h2, c2]
    total = sum((given[i % 2][i // 2] * s[0]).sum() for i, s in enumerate(states))
    for t in range(STEPS):
        found = torch.autograd.grad(total, entering[t + 1], retain_graph=True)
        for i, g in enumerate(found):
            torch.testing.assert_close(mine[i % 2][t, i // 2], g[0])


def test_training_mode_leaves_the_model_and_the_random_state_alone():
    model = Encoded(nn.LSTM(3, 4, 2, dropout=0.5)).train()
    x, y = torch.randint(7, (STEPS, ROWS)), torch.randn(STEPS, ROWS, 4)
    random = torch.get_rng_state()
    profile = at.probe(model, F.mse_loss, x, y)
    assert torch.equal(torch.get_rng_state(), random)
    assert np.isfinite(profile.state_norms).all()
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


class Dropped(nn.Module):
    """Drops parts of its state while training: eval mode alone does not show it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(3, 4)

    def forward(self, x, state):
        h, state = self.layer(x, state)
        return h, F.dropout(state, 0.5, self.training)


class Packed(nn.Module):
    """Hands packed sequences to its layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(3, 4)

    def forward(self, x, state):
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.full((x.shape[1],), len(x)))
        h, state = self.layer(packed, state)
        return nn.utils.rnn.pad_packed_sequence(h)[0], state


class StepByStep(nn.Module):
    """Calls its layer once per step."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(3, 4)

    def forward(self, x, state):
        out = []
        for step in x:
            h, state = self.layer(step[None], state)
            out.append(h)
        return torch.cat(out), state


def test_a_single_step_does_not_decide_for_the_fast_path():
    x, y = torch.randn(STEPS, ROWS, 3), torch.randn(STEPS, ROWS, 4)
    resets = torch.zeros(STEPS, ROWS, dtype=torch.bool)
    resets[1, 0] = True
    model = StepByStep()
    assert_same(*both(model, x, y, resets=resets), rtol=1e-5)
    assert not is_fused(model, x[:1])
    assert not is_fused(model, x)


def test_the_path_is_decided_anew_for_another_number_format_or_other_settings(monkeypatch):
    x, y = torch.randn(STEPS, ROWS, 3), torch.randn(STEPS, ROWS, 4)
    model, taken = at.model.as_recurrent(nn.GRU(3, 4)), []
    for name in ("StepPass", "fused_pass"):
        run = getattr(lag_probe, name)
        monkeypatch.setattr(
            lag_probe, name, lambda *a, name=name, run=run: (taken.append(name), run(*a))[1]
        )
    at.probe(model, F.mse_loss, x, y)
    at.probe(model, F.mse_loss, x, y, settings=GENERAL)
    model.module.float()
    at.probe(model, F.mse_loss, x.float(), y.float())
    with torch.autocast("cpu", torch.bfloat16):
        at.probe(model, F.mse_loss, x.float(), y.float())
    assert taken == ["fused_pass", "StepPass", "fused_pass", "StepPass"]


def test_a_loop_decides_once_however_often_it_estimates(monkeypatch):
    decided, find = [], fused_layer.find_fused_layer
    monkeypatch.setattr(
        fused_layer, "find_fused_layer", lambda *a: (decided.append(1), find(*a))[1]
    )
    stream = at.SequenceStream(torch.randn(90, ROWS, 3), torch.randn(90, ROWS, 4))
    rule = at.BiasTolerance(0.5, k_max=8, lags=10, gauge=at.truncate.PaperGauge())
    tbptt = at.AdaptiveTBPTT(nn.GRU(3, 4), F.mse_loss, rule, estimates_per_epoch=5, burn_in=2)
    for window in tbptt.windows(stream):
        window.backward()
    assert len(tbptt.history) == 5
    assert len(decided) == 1
    # A plan holds for the number format it was made for.
    tbptt.recurrent.module.float()
    tbptt.estimate(
        at.SequenceStream(torch.randn(90, ROWS, 3).float(), torch.randn(90, ROWS, 4).float())
    )
    assert len(decided) == 2


@pytest.mark.parametrize("make", [Dropped, Packed])
def test_the_fast_path_is_not_taken_where_training_or_packing_differs(make):
    model = make()
    x, y = torch.randn(STEPS, ROWS, 3), torch.randn(STEPS, ROWS, 4)
    assert not is_fused(model, x)
    torch.manual_seed(5)
    fast = at.probe(model, F.mse_loss, x, y)
    torch.manual_seed(5)
    slow = at.probe(model, F.mse_loss, x, y, settings=GENERAL)
    np.testing.assert_allclose(fast.state_norms, slow.state_norms)
