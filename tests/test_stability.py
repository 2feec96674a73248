import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at
from adaptive_tbptt.stability import contraction, jacobian_norms

from .oracle import DictState, LinearRNN

DECAY = at.fit_decay(0.5 ** np.arange(21.0))
GROWTH = at.fit_decay(1.1 ** np.arange(21.0))


def dense_norms(recurrent, x, state):
    """The twin: the whole Jacobian of each row, then its largest singular value."""
    parts = recurrent.components(state)
    rows = next(iter(parts.values())).shape[0]
    leaves = [
        s.detach().requires_grad_() for s in (state if isinstance(state, tuple) else (state,))
    ]
    given = tuple(leaves) if isinstance(state, tuple) else leaves[0]
    after = recurrent.components(recurrent.core(x, given)[1])
    norms = []
    for row in range(rows):
        jacobian = []
        for part in after.values():
            for value in part[row]:
                gradient = torch.autograd.grad(value, leaves, retain_graph=True)
                jacobian.append(torch.cat([g[..., row, :].flatten() for g in gradient]))
        norms.append(torch.linalg.matrix_norm(torch.stack(jacobian), 2))
    return torch.stack(norms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layer", [nn.LSTM(3, 4, 2), nn.GRU(3, 4, 2), nn.RNN(3, 4)])
def test_jacobian_norms_equal_the_largest_singular_value(layer, dtype):
    recurrent = at.as_recurrent(layer.to(dtype))
    x = torch.randn(1, 5, 3, dtype=dtype)
    state = recurrent.initial_state(x)
    state = (
        tuple(torch.randn_like(s) for s in state)
        if isinstance(state, tuple)
        else torch.randn_like(state)
    )
    ours = jacobian_norms(recurrent, x, state, tolerance=1e-7, iterations=2000)
    torch.testing.assert_close(ours, dense_norms(recurrent, x, state).double(), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("scale", "stable", "says"),
    [(0.5, True, "stable: "), (0.999, True, "stable"), (1.5, False, "")],
)
def test_simple_rnn_is_stable_when_its_spectral_norm_is_below_one(scale, stable, says):
    rnn = nn.RNN(3, 4, 2)
    with torch.no_grad():
        for name in ("weight_hh_l0", "weight_hh_l1"):
            getattr(rnn, name).copy_(scale * torch.linalg.qr(torch.randn(4, 4))[0])
    result = at.stability(rnn, torch.randn(30, 5, 3), DECAY)
    assert result.stable is stable
    assert result.verdict.startswith(says)


def test_an_unstable_model_may_be_stable_on_its_data():
    rnn = nn.RNN(3, 4)
    with torch.no_grad():
        rnn.weight_hh_l0.copy_(1.5 * torch.eye(4))
        rnn.bias_hh_l0.fill_(5.0)  # tanh saturates: no observed step stretches the state
    result = at.stability(rnn, torch.randn(30, 5, 3), DECAY, burn_in=5)
    assert result.stable is False
    assert result.data_dependent_stable
    assert "stable on this data" in result.verdict


def test_a_resetting_recurrence_is_only_decaying_in_expectation():
    model = LinearRNN(1.25 * torch.eye(2))
    x = torch.randn(40, 8, 3)
    x[..., -1] = (torch.rand(40, 8) < 0.3).float()
    result = at.stability(model, x, DECAY)
    assert result.stable is None
    assert result.jacobian_norm == pytest.approx(1.25, rel=1e-3)
    assert result.verdict.startswith("decaying in expectation though unstable")
    assert at.stability(model, x, GROWTH).verdict.startswith("not decaying")


def small_lstm(scale):
    lstm = nn.LSTM(3, 4, 2)
    with torch.no_grad():
        for p in lstm.parameters():
            p.mul_(scale)
    return lstm


def test_lstm_condition_of_miller_and_hardt():
    x = torch.randn(60, 5, 3)
    assert at.stability(small_lstm(0.05), x, DECAY).stable is True
    assert at.stability(nn.LSTM(3, 4, 2), x, DECAY).stable is False
    # Where it holds, several steps together contract: the gradient dies whatever the data.
    profile = at.probe(small_lstm(0.05), F.mse_loss, x, torch.zeros(60, 5, 4))
    assert at.fit_decay(profile.mean).beta < 0.8


def test_lstm_condition_by_hand():
    lstm = nn.LSTM(1, 1)
    with torch.no_grad():
        lstm.weight_ih_l0.zero_()
        lstm.bias_ih_l0.zero_()
        lstm.bias_hh_l0.zero_()
        # f <= sigma(0.2), so 1 - f >= 0.45: 0.44 < 0.45, 0.2 < 0.2026, 0.11 < 0.1125.
        lstm.weight_hh_l0.copy_(torch.tensor([[0.44], [0.2], [0.11], [0.44]]))
    assert contraction(lstm, {lstm: 1.0})[0] is True
    for row, value in ((0, 0.46), (1, 0.25), (2, 0.12), (3, 0.46)):
        worse = lstm.weight_hh_l0.detach().clone()
        worse[row] = value
        other = nn.LSTM(1, 1)
        other.load_state_dict(lstm.state_dict() | {"weight_hh_l0": worse})
        assert contraction(other, {other: 1.0})[0] is False
    # Larger inputs reach the forget gate through its input weight.
    with torch.no_grad():
        lstm.weight_ih_l0[1] = 0.1
    assert contraction(lstm, {lstm: 0.01})[0] is True
    assert contraction(lstm, {lstm: 10.0})[0] is False


@pytest.mark.parametrize("module", [nn.GRU(3, 4), DictState()])
def test_modules_without_a_known_condition_say_so(module):
    result = at.stability(module, torch.randn(20, 5, 3), DECAY)
    assert result.stable is None
    assert "no sufficient condition is known" in result.condition
    assert result.jacobian_norm > 0
    assert not any(m._forward_pre_hooks for m in module.modules())
