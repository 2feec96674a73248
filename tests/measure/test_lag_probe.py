"""The probe against its brute-force twin, and what it must leave alone."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at

from ..oracle import CoreHead, DictState, entering_norms

pytestmark = pytest.mark.usefixtures("double")
STEPS, ROWS, INPUTS = 7, 3, 3


def data(outputs, steps=STEPS):
    return torch.randn(steps, ROWS, INPUTS), torch.randn(steps, ROWS, outputs)


def wrap(layer):
    """Give a *Cell the interface of a layer, by hand."""

    def run(x, state):
        outputs = []
        for xt in x:
            state = layer(xt, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs), state

    return run


LAYERS = {
    "rnn": lambda: nn.RNN(INPUTS, 4),
    "rnn-relu-2": lambda: nn.RNN(INPUTS, 4, 2, nonlinearity="relu"),
    "gru": lambda: nn.GRU(INPUTS, 4),
    "gru-2": lambda: nn.GRU(INPUTS, 4, 2),
    "lstm": lambda: nn.LSTM(INPUTS, 4),
    "lstm-2": lambda: nn.LSTM(INPUTS, 4, 2),
    "lstm-no-bias": lambda: nn.LSTM(INPUTS, 4, bias=False),
    "lstm-proj": lambda: nn.LSTM(INPUTS, 5, 2, proj_size=4),
}
CELLS = {"rnn-cell": nn.RNNCell, "gru-cell": nn.GRUCell, "lstm-cell": nn.LSTMCell}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("burn_in", [0, 2])
def test_layers_equal_the_twin(name, burn_in):
    model = LAYERS[name]()
    x, y = data(4)
    profile = at.probe(model, F.mse_loss, x, y, burn_in=burn_in)
    _, warm = (
        model(x[:burn_in]) if burn_in else (None, at.model.as_recurrent(model).initial_state(x))
    )
    twin = entering_norms(
        model, lambda out, row: F.mse_loss(out[-1, row], y[-1, row]), x[burn_in:], warm, ROWS
    )
    np.testing.assert_allclose(profile.state_norms[1:], twin, rtol=1e-10)
    readout = model(x)[0][-1].detach().requires_grad_()
    lag0 = torch.autograd.grad(F.mse_loss(readout, y[-1]) * ROWS, readout)[0].norm(dim=1)
    np.testing.assert_allclose(profile.state_norms[0], lag0, rtol=1e-10)


@pytest.mark.parametrize("name", CELLS)
def test_cells_equal_the_twin(name):
    model = CELLS[name](INPUTS, 4)
    x, y = data(4)
    profile = at.probe(model, F.mse_loss, x, y)
    start = at.model.as_recurrent(model).initial_state(x)
    twin = entering_norms(
        wrap(model), lambda out, row: F.mse_loss(out[-1, row], y[-1, row]), x, start, ROWS
    )
    np.testing.assert_allclose(profile.state_norms[1:], twin, rtol=1e-10)


def test_custom_module_with_dict_state_and_flat_outputs_equals_the_twin():
    # The twin's start state makes the upper layer's new state depend on the lower one's within a
    # step: a probe that differentiates the returned state itself would count that path too.
    model = DictState()
    x, y = data(2)

    def loss(outputs, targets):
        return F.mse_loss(outputs, targets.flatten(0, 1))

    profile = at.probe(model, loss, x, y)
    twin = entering_norms(
        model,
        lambda out, row: F.mse_loss(out[row], y[-1, row]),
        x,
        at.model.as_recurrent(model).initial_state(x),
        ROWS,
    )
    np.testing.assert_allclose(profile.state_norms[1:], twin, rtol=1e-10)
    assert np.isnan(profile.state_norms[0]).all()
    assert profile.mean[0] == 0.0
    assert list(profile.component_norms) == ["low", "high.0"]


@pytest.mark.parametrize("layer", ["gru-2", "lstm-2"])
def test_core_and_head_equal_the_twin_and_the_head_runs_once(layer):
    model = CoreHead(LAYERS[layer](), 4)
    x, y = data(2)
    profile = at.probe(model, F.mse_loss, x, y, burn_in=2)
    assert model.head_calls == 1
    _, warm = model.core(x[:2], None)
    twin = entering_norms(
        model, lambda out, row: F.mse_loss(out[-1, row], y[-1, row]), x[2:], warm, ROWS
    )
    np.testing.assert_allclose(profile.state_norms[1:], twin, rtol=1e-10)
    features = model.core(x, None)[0][-1].detach().requires_grad_()
    lag0 = torch.autograd.grad(ROWS * F.mse_loss(model.readout(features), y[-1]), features)[0]
    np.testing.assert_allclose(profile.state_norms[0], lag0.norm(dim=1), rtol=1e-10)


def test_cumulative_norms_are_of_the_mean_summed_state_gradient():
    model = nn.LSTM(INPUTS, 4, 2)
    x, y = data(4)
    profile = at.probe(model, F.mse_loss, x, y)
    h, c = (torch.zeros(2, ROWS, 4, requires_grad=True) for _ in range(2))
    entering, state = [], (h, c)
    for t in range(STEPS):
        state = tuple(s.clone() for s in state)
        entering.append(state)
        out, state = model(x[t : t + 1], state)
    loss = F.mse_loss(out[-1], y[-1])
    total, expected = torch.zeros(2, 2, 4), [0.0]  # what the readout sees is no part of it
    for state in reversed(entering):
        total = total + torch.stack(torch.autograd.grad(loss, state, retain_graph=True)).sum(2)
        expected.append(float(total.norm()))
    np.testing.assert_allclose(profile.cumulative_norms, expected, rtol=1e-10)


def test_components_add_up_and_are_named_by_layer():
    profile = at.probe(nn.LSTM(INPUTS, 4, 2), F.mse_loss, *data(4))
    assert list(profile.component_norms) == ["h[0]", "h[1]", "c[0]", "c[1]"]
    squares = sum(norms**2 for norms in profile.component_norms.values())
    np.testing.assert_allclose(np.sqrt(squares), profile.state_norms, rtol=1e-12)


def test_batch_first_is_a_matter_of_layout_only():
    model = nn.LSTM(INPUTS, 4, batch_first=True)
    x, y = data(4)
    theirs = at.probe(model, F.mse_loss, x.transpose(0, 1), y.transpose(0, 1), burn_in=1)
    plain = nn.LSTM(INPUTS, 4)
    plain.load_state_dict(model.state_dict())
    ours = at.probe(plain, F.mse_loss, x, y, burn_in=1)
    np.testing.assert_allclose(theirs.state_norms, ours.state_norms, rtol=1e-12)
    custom = CoreHead(model, 4, outputs=4)
    z = at.probe(custom, F.mse_loss, x.transpose(0, 1), y.transpose(0, 1), batch_first=True)
    assert z.state_norms.shape == (STEPS + 1, ROWS)


def test_scaling_the_loss_scales_phi_and_changes_no_k():
    model, (x, y) = nn.GRU(INPUTS, 6), data(6, steps=60)
    one = at.probe(model, F.mse_loss, x, y)
    many = at.probe(model, lambda o, t: 1e5 * F.mse_loss(o, t), x, y)
    np.testing.assert_allclose(many.state_norms, 1e5 * one.state_norms, rtol=1e-10)
    for gauge in (at.truncate.PaperGauge(), at.truncate.ReleaseGauge()):
        for delta in (0.9, 0.5, 0.1):
            ks = [at.choose_truncation(gauge.bias(p), delta=delta).k for p in (one, many)]
            assert ks[0] == ks[1]


def test_permuting_rows_permutes_columns():
    model, (x, y) = nn.LSTM(INPUTS, 4), data(4)
    order = torch.tensor([2, 0, 1])
    one, two = (
        at.probe(model, F.mse_loss, x, y),
        at.probe(model, F.mse_loss, x[:, order], y[:, order]),
    )
    np.testing.assert_allclose(two.state_norms, one.state_norms[:, order], rtol=1e-10)


def test_a_reset_cuts_the_gradient_of_exactly_its_row():
    model, (x, y) = nn.LSTM(INPUTS, 4), data(4)
    resets = torch.zeros(STEPS, ROWS, dtype=torch.bool)
    resets[4, 1] = True
    cut = at.probe(model, F.mse_loss, x, y, resets=resets)
    whole = at.probe(model, F.mse_loss, x, y)
    alone = at.probe(model, F.mse_loss, x[4:, 1:2], y[4:, 1:2])
    # Row 1 starts anew at step 4: lags 1 and 2 enter steps 6 and 5; lag 3 entered step 4.
    assert (cut.state_norms[3:, 1] == 0.0).all()
    np.testing.assert_allclose(cut.state_norms[:3, 1], alone.state_norms[:3, 0], rtol=1e-10)
    np.testing.assert_allclose(cut.state_norms[:, [0, 2]], whole.state_norms[:, [0, 2]], rtol=1e-10)


def test_resets_are_counted_from_the_start_of_the_burn_in():
    model, (x, y) = nn.LSTM(INPUTS, 4), data(4)
    resets = torch.zeros(STEPS, ROWS, dtype=torch.bool)
    resets[1, 0] = resets[5, 1] = True  # inside the burn-in, and inside the window
    cut = at.probe(model, F.mse_loss, x, y, burn_in=3, resets=resets)
    warmed = at.probe(model, F.mse_loss, x[1:, :1], y[1:, :1], burn_in=2)
    alone = at.probe(model, F.mse_loss, x[5:, 1:2], y[5:, 1:2])
    whole = at.probe(model, F.mse_loss, x, y, burn_in=3)
    np.testing.assert_allclose(cut.state_norms[:, 0], warmed.state_norms[:, 0], rtol=1e-10)
    np.testing.assert_allclose(cut.state_norms[:2, 1], alone.state_norms[:2, 0], rtol=1e-10)
    assert (cut.state_norms[2:, 1] == 0.0).all()
    np.testing.assert_allclose(cut.state_norms[:, 2], whole.state_norms[:, 2], rtol=1e-10)


def test_rows_that_all_start_at_the_last_step_have_zeros_and_no_error():
    resets = torch.zeros(STEPS, ROWS, dtype=torch.bool)
    resets[-1] = True
    profile = at.probe(nn.LSTM(INPUTS, 4), F.mse_loss, *data(4), resets=resets)
    assert (profile.state_norms[0] > 0.0).all()
    assert (profile.state_norms[1:] == 0.0).all()


def test_joining_profiles_equals_probing_all_rows():
    model, (x, y) = nn.LSTM(INPUTS, 4), data(4)
    parts = [at.probe(model, F.mse_loss, x[:, i], y[:, i]) for i in (slice(0, 1), slice(1, 3))]
    joined, whole = at.estimate.LagProfile.concatenate(parts), at.probe(model, F.mse_loss, x, y)
    np.testing.assert_allclose(joined.state_norms, whole.state_norms, rtol=1e-10)
    np.testing.assert_allclose(joined.cumulative_norms, whole.cumulative_norms, rtol=1e-10)


class Busy(nn.Module):
    """Dropout, a buffer that every forward pass changes, and a readout with a gradient waiting."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(INPUTS, 4, 2, dropout=0.5)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, state):
        self.calls += 1
        self.calls = self.calls + 1
        out, state = self.lstm(self.drop(x), state)
        return out, state


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_and_the_random_state_are_left_alone(fails):
    model, (x, y) = Busy(), data(4)
    model.drop.eval()
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    buffer, random = model.calls, torch.get_rng_state()
    if fails:
        with pytest.raises(ZeroDivisionError):
            at.probe(model, lambda o, t: 1 / 0, x, y, train=True)
    else:
        assert at.probe(model, F.mse_loss, x, y, train=True).train
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert not model.drop.training
    assert model.calls is buffer
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all((p.grad == 3.0).all() for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("fused", [True, False])
def test_rows_that_a_mask_leaves_out_have_norm_zero(fused):
    model, (x, y) = nn.LSTM(INPUTS, 4), data(4)
    mask = torch.ones(STEPS, ROWS)
    mask[:, 0] = 0.0

    def loss_fn(outputs, targets):
        y, mask = targets
        return ((outputs - y).square().mean(-1) * mask).sum() / mask.sum()

    settings = at.measure.ProbeSettings(fused=fused)
    count = lambda targets: float(targets[1].sum())  # noqa: E731
    found = at.probe(model, loss_fn, x, (y, mask), count_losses=count, settings=settings)
    assert (found.state_norms[:, 0] == 0.0).all()
    assert np.isfinite(found.state_norms).all()
    assert (found.state_norms[:, 1:] > 0.0).all()


def test_buffers_of_a_loss_are_left_alone():
    class Counting(nn.MSELoss):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, out, target):
            self.calls += 1
            return super().forward(out, target)

    loss = Counting()
    at.probe(nn.LSTM(INPUTS, 4), loss, *data(4))
    assert loss.calls == 0


def test_the_mode_is_the_models_own_unless_asked():
    model, (x, y) = Busy(), data(4)
    model.eval()
    assert not at.probe(model, F.mse_loss, x, y).train
    assert at.probe(model, F.mse_loss, x, y, train=True).train
    assert at.probe(Busy(), F.mse_loss, x, y).train
    assert not at.probe(Busy(), F.mse_loss, x, y, train=False).train
    repeat = [at.probe(model, F.mse_loss, x, y).mean for _ in range(2)]
    np.testing.assert_array_equal(*repeat)


def test_works_under_no_grad_and_with_frozen_parameters():
    model, (x, y) = nn.LSTM(INPUTS, 4), data(4)
    free = at.probe(model, F.mse_loss, x, y)
    model.requires_grad_(False)
    with torch.no_grad():
        frozen = at.probe(model, F.mse_loss, x, y)
    np.testing.assert_array_equal(free.state_norms, frozen.state_norms)


def test_a_learned_initial_state_is_asked_for():
    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.h0 = nn.RNN(INPUTS, 4), nn.Parameter(torch.randn(4))

        def forward(self, x, state):
            state = self.h0.expand(1, x.shape[1], 4).contiguous() if state is None else state
            return self.rnn(x, state)

    x, y = data(4)
    model = Learned()
    with pytest.raises(ValueError, match="initial_state"):
        at.probe(model, F.mse_loss, x, y)
    assert at.probe(model, F.mse_loss, x, y, burn_in=1).lags == STEPS - 1
    model.initial_state = lambda rows: model.h0.expand(1, rows, 4).contiguous()
    told = at.probe(model, F.mse_loss, x, y)
    start = model.h0.detach().expand(1, ROWS, 4).contiguous()
    given = at.probe(model.rnn, F.mse_loss, x, y, state=start)
    np.testing.assert_allclose(told.state_norms[1:], given.state_norms[1:], rtol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_the_norms_are_the_same():
    model, (x, y) = nn.LSTM(INPUTS, 4, 2), data(4)
    here = at.probe(model, F.mse_loss, x, y)
    there = at.probe(model.cuda(), F.mse_loss, x, y)
    np.testing.assert_allclose(there.state_norms, here.state_norms, rtol=1e-6)


def test_a_sparse_embedding_is_measured_like_a_dense_one():
    class Model(nn.Module):
        def __init__(self, sparse):
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.layer = nn.Embedding(5, 3, sparse=sparse), nn.GRU(3, 4)

        def forward(self, inputs, state=None):
            return self.layer(self.embedding(inputs), state)

    x, y = torch.randint(5, (80, 3)), torch.randn(80, 3, 4)
    for fused in (True, False):
        sparse, dense = (
            at.probe(
                Model(s), F.mse_loss, x, y, settings=at.measure.ProbeSettings(fused=fused)
            ).state_norms
            for s in (True, False)
        )
        np.testing.assert_allclose(sparse, dense, rtol=1e-5)
    stream = at.SequenceStream(x, y)
    sparse, dense = (
        at.check_bias(Model(s), F.mse_loss, stream, [3], lags=10) for s in (True, False)
    )
    assert sparse[0].low == pytest.approx(dense[0].low, rel=1e-4)


def test_rows_without_a_loss_do_not_tell_whether_the_state_is_reached():
    """Row 0 starts a sequence at the last step, row 1 has no target there: nothing is amiss."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 2, 3), torch.randint(4, (6, 2))
    y[-1, 1] = -100
    resets = torch.zeros(6, 2, dtype=torch.bool)
    resets[-1, 0] = True

    def loss_fn(outputs, targets):
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100)

    found = at.probe(
        nn.GRU(3, 4), loss_fn, x, y, resets=resets, count_losses=lambda t: float((t != -100).sum())
    )
    assert not found.state_norms[1:].any()
