import numpy as np
import pytest
import torch
from tests.oracle import DictState, LinearRNN
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at
from atbptt_paper.decay import stability
from atbptt_paper.decay.contraction import contraction

DECAY = at.fit_decay(0.5 ** np.arange(21.0))
GROWTH = at.fit_decay(1.1 ** np.arange(21.0))


@pytest.mark.parametrize(
    ("scale", "stable", "says"),
    [(0.5, True, "stable: "), (0.999, True, "stable"), (1.5, False, "")],
)
def test_simple_rnn_is_stable_when_its_spectral_norm_is_below_one(scale, stable, says):
    rnn = nn.RNN(3, 4, 2)
    with torch.no_grad():
        for name in ("weight_hh_l0", "weight_hh_l1"):
            getattr(rnn, name).copy_(scale * torch.linalg.qr(torch.randn(4, 4))[0])
    result = stability(rnn, torch.randn(30, 5, 3), DECAY)
    assert result.stable is stable
    assert result.verdict.startswith(says)


def test_an_unstable_model_may_be_stable_on_its_data():
    rnn = nn.RNN(3, 4)
    with torch.no_grad():
        rnn.weight_hh_l0.copy_(1.5 * torch.eye(4))
        rnn.bias_hh_l0.fill_(5.0)  # tanh saturates: no observed step stretches the state
    result = stability(rnn, torch.randn(30, 5, 3), DECAY, burn_in=5)
    assert result.stable is False
    assert result.data_dependent_stable
    assert "stable on this data" in result.verdict


def test_a_resetting_recurrence_is_only_decaying_in_expectation():
    model = LinearRNN(1.25 * torch.eye(2))
    x = torch.randn(40, 8, 3)
    x[..., -1] = (torch.rand(40, 8) < 0.3).float()
    result = stability(model, x, DECAY)
    assert result.stable is None
    assert result.jacobian_norm == pytest.approx(1.25, rel=1e-3)
    assert result.verdict.startswith("decaying in expectation though unstable")
    assert stability(model, x, GROWTH).verdict.startswith("not decaying")


def test_rows_that_always_reset_have_no_jacobian():
    resets = torch.ones(10, 5, dtype=torch.bool)
    result = stability(nn.RNN(3, 4), torch.randn(10, 5, 3), DECAY, resets=resets)
    assert result.jacobian_norm == 0.0


def small_lstm(scale):
    lstm = nn.LSTM(3, 4, 2)
    with torch.no_grad():
        for p in lstm.parameters():
            p.mul_(scale)
    return lstm


def test_lstm_condition_of_miller_and_hardt():
    x = torch.randn(60, 5, 3)
    assert stability(small_lstm(0.05), x, DECAY).stable is True
    assert stability(nn.LSTM(3, 4, 2), x, DECAY).stable is False
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
    result = stability(module, torch.randn(20, 5, 3), DECAY)
    assert result.stable is None
    assert "no sufficient condition is known" in result.condition
    assert result.jacobian_norm > 0
    assert not any(m._forward_pre_hooks for m in module.modules())


def test_lstm_condition_counts_both_biases_of_the_forget_gate():
    lstm = nn.LSTM(1, 1)
    with torch.no_grad():
        for p in lstm.parameters():
            p.zero_()
        lstm.weight_hh_l0.copy_(torch.tensor([[0.44], [0.2], [0.11], [0.44]]))
        for ih, hh, stable in ((1.0, 0.0, False), (0.0, 1.0, False), (1.0, -1.0, True)):
            lstm.bias_ih_l0[1], lstm.bias_hh_l0[1] = ih, hh
            assert contraction(lstm, {lstm: 1.0})[0] is stable


def test_an_upper_lstm_layer_reads_inputs_smaller_than_one():
    lstm = nn.LSTM(1, 1, 2)
    with torch.no_grad():
        for p in lstm.parameters():
            p.zero_()
        lstm.weight_hh_l0.fill_(0.1)
        lstm.weight_hh_l1.fill_(0.1)
        lstm.weight_ih_l1[1] = 0.1
        assert contraction(lstm, {lstm: 1000.0})[0] is True
        lstm.weight_ih_l1[1] = 3.0
        assert contraction(lstm, {lstm: 0.0})[0] is False


class Square(nn.Module):
    """h_t = h_{t-1}^2 / 2 + x_t, so that dh_t/dh_{t-1} = h_{t-1}: it shows which state was seen."""

    def forward(self, x, state):
        h = x.new_zeros(x.shape[1], 1) if state is None else state
        for xt in x:
            h = h.square() / 2 + xt
        return h, h


@pytest.mark.parametrize(("burn_in", "norm"), [(0, 0.5), (1, 0.5), (2, 0.125), (3, 0.125**2 / 2)])
def test_states_are_observed_after_the_burn_in(burn_in, norm):
    x = torch.tensor([0.5, 0.0, 0.0, 0.0]).view(4, 1, 1)
    found = stability(Square(), x, DECAY, burn_in=burn_in)
    assert found.jacobian_norm == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("burn_in", [0, 1])
def test_steps_that_reset_a_row_are_not_observed(burn_in):
    x = torch.tensor([3.0, 0.25, 0.0]).view(3, 1, 1)
    resets = torch.tensor([False, True, False]).view(3, 1)
    found = stability(Square(), x, DECAY, resets=resets, burn_in=burn_in)
    assert found.jacobian_norm == pytest.approx(0.25, rel=1e-6)


def test_dropout_is_off_while_the_jacobian_is_taken():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x, state):
            h = x.new_zeros(x.shape[1], 1) if state is None else state
            for xt in x:
                h = 0.5 * self.drop(h) + xt
            return h, h

    model = Dropped()
    assert stability(model, torch.randn(9, 4, 1), DECAY).jacobian_norm == pytest.approx(0.5)
    assert model.training


def test_the_largest_input_is_that_of_the_whole_run():
    x = torch.randn(60, 5, 3)
    assert stability(small_lstm(0.05), x, DECAY).stable is True
    x[7, 2, 1] = -1000.0
    assert stability(small_lstm(0.05), x, DECAY).stable is False


def test_parts_that_contract_do_not_make_the_whole_contract():
    class Louder(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(3, 4)
            nn.init.eye_(self.rnn.weight_hh_l0).data.mul_(0.5)

        def forward(self, x, state):
            return self.rnn(x, None if state is None else 4 * state)

    found = stability(Louder(), torch.zeros(20, 5, 3), DECAY)
    assert found.jacobian_norm > 1.0
    assert found.stable is False
    assert "the whole does not" in found.condition
    assert found.verdict.startswith("decaying in expectation though unstable")


def test_layers_that_contract_contract_over_several_steps_together():
    rnn = nn.RNN(3, 4, 2)
    with torch.no_grad():
        for p in rnn.parameters():
            p.zero_()
        for name, scale in (("hh_l0", 0.5), ("hh_l1", 0.5), ("ih_l1", 10.0)):
            getattr(rnn, f"weight_{name}").copy_(scale * torch.eye(4))
    found = stability(rnn, torch.zeros(20, 5, 3), DECAY)
    # Per unit: h0' = 0.5 h0, h1' = 10 h0' + 0.5 h1.
    expected = np.linalg.norm([[0.5, 0.0], [5.0, 0.5]], 2)
    assert found.jacobian_norm == pytest.approx(expected, rel=1e-3)
    assert found.stable is True
    assert found.verdict.startswith("stable over several steps together")


def test_a_direction_that_stretches_is_found_among_many_that_do_not():
    weight = torch.full((300,), 0.95)
    weight[17] = 1.02
    found = stability(LinearRNN(weight.diag()), torch.zeros(4, 3, 301), DECAY)
    assert found.jacobian_norm == pytest.approx(1.02, rel=5e-3)


@pytest.mark.parametrize("learned", [False, True])
def test_a_part_of_the_state_may_not_depend_on_the_state_before(learned):
    class Delays(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(()), requires_grad=learned)

        def forward(self, x, state):
            zero = x.new_zeros(x.shape[1], 2)
            h, past = (zero, zero) if state is None else state
            for xt in x:
                h, past = 0.5 * h + 0.25 * past, self.w * xt
            return h, (h, past)

    found = stability(Delays(), torch.randn(9, 4, 2), DECAY)
    assert found.jacobian_norm == pytest.approx(np.hypot(0.5, 0.25), rel=1e-3)


def test_a_part_of_the_state_may_never_be_read():
    class Notes(nn.Module):
        def forward(self, x, state):
            h = x.new_zeros(x.shape[1], 2) if state is None else state[0]
            for xt in x:
                h = 0.5 * h + xt
            return h, (h, 3 * h)

    # h' = h / 2 and 3 h' both depend on h, nothing on the old 3 h.
    found = stability(Notes(), torch.randn(9, 4, 2), DECAY)
    assert found.jacobian_norm == pytest.approx(np.hypot(0.5, 1.5), rel=1e-3)


def test_layout_and_the_way_the_layer_is_called_do_not_matter():
    class Named(nn.Module):
        def __init__(self, lstm):
            super().__init__()
            self.lstm = lstm

        def forward(self, x, state):
            return self.lstm(input=x, hx=state)

    x = torch.randn(20, 5, 3)
    plain, swapped = nn.LSTM(3, 4), nn.LSTM(3, 4, batch_first=True)
    swapped.load_state_dict(plain.state_dict())
    ours = stability(plain, x, DECAY, burn_in=3)
    theirs = stability(swapped, x.transpose(0, 1), DECAY, burn_in=3)
    named = stability(Named(plain), x, DECAY, burn_in=3)
    assert theirs.condition == ours.condition == named.condition.removeprefix("'lstm' ")
    for other in (theirs, named):
        assert other.jacobian_norm == pytest.approx(ours.jacobian_norm, rel=1e-5)


def test_a_burn_in_does_without_an_initial_state():
    class Ones(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(3, 4)

        def forward(self, x, state):
            return self.rnn(x, torch.ones(1, x.shape[1], 4) if state is None else state)

    model, x = Ones(), torch.randn(20, 5, 3)
    with pytest.raises(ValueError, match="initial_state"):
        stability(model, x, DECAY)
    _, h = model(x[:-1], None)
    # Only the last step is observed: diag(1 - h^2) W for each row.
    slope = 1 - model.rnn(x[-1:], h)[0][0].square()
    jacobians = slope[:, :, None] * model.rnn.weight_hh_l0
    expected = float(torch.linalg.matrix_norm(jacobians.detach(), 2).max())
    found = stability(model, x, DECAY, burn_in=19).jacobian_norm
    assert found == pytest.approx(expected, rel=1e-3)
