"""Bad input gets a sentence that says what was expected, and changes nothing."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at

X, Y = torch.randn(12, 3, 2), torch.randn(12, 3, 4)


def curve():
    phi = 0.5 ** np.arange(11.0)
    return at.bias_bound(phi, at.fit_decay(phi))


@pytest.mark.parametrize("delta", [0.0, 1.0, 1.5, -0.1, float("nan")])
def test_delta_outside_the_unit_interval(delta):
    with pytest.raises(ValueError, match=r"delta must be in \(0, 1\).*10 %"):
        at.choose_truncation(curve(), delta=delta)


def test_delta_has_no_default():
    with pytest.raises(TypeError, match="delta"):
        at.choose_truncation(curve())


@pytest.mark.parametrize(
    ("low", "high", "says"), [(5, 4, "must not exceed"), (-1, 4, "not be negative")]
)
def test_limits_of_k(low, high, says):
    with pytest.raises(ValueError, match=says):
        at.choose_truncation(curve(), delta=0.1, k_min=low, k_max=high)


def test_window_longer_than_the_data():
    stream = at.SequenceStream(X, Y)
    with pytest.raises(ValueError, match="121 steps does not fit into a stream of 12"):
        at.check_bias(nn.LSTM(2, 4), F.mse_loss, stream, 5)
    with pytest.raises(ValueError, match="rows of 12 steps are too short for a burn-in of 20"):
        at.diagnose(nn.LSTM(2, 4), F.mse_loss, stream)
    swapped = torch.randn(12, 200, 2), torch.randn(12, 200, 4)  # (batch, time, ...)
    with pytest.raises(
        ValueError, match=r"There are 200 rows. If these are steps.*batch_first=True"
    ):
        at.diagnose(nn.LSTM(2, 4), F.mse_loss, swapped)
    with pytest.raises(ValueError, match="burn_in must be in"):
        at.probe(nn.LSTM(2, 4), F.mse_loss, X, Y, burn_in=12)


def test_windows_in_a_form_of_their_own():
    with pytest.raises(
        TypeError, match=r"must be \(inputs, targets\).*got dict.*map\(as_pair, loader"
    ):
        at.lookback(nn.LSTM(2, 4), F.mse_loss, [{"x": X, "y": Y}])


class Wrapped(nn.Module):
    def __init__(self, change_in=lambda s: s, change_out=lambda s: s):
        super().__init__()
        self.rnn = nn.RNN(2, 4)
        self.change_in, self.change_out = change_in, change_out

    def forward(self, x, state):
        out, state = self.rnn(x, None if state is None else self.change_in(state))
        return out, self.change_out(state)


def test_a_kernel_that_drops_the_state():
    with pytest.raises(ValueError, match="no gradient reaches the state"):
        at.probe(Wrapped(change_in=torch.Tensor.detach), F.mse_loss, X, Y)
    with pytest.raises(ValueError, match="no gradient reaches the state"):
        at.probe(Wrapped(change_in=torch.zeros_like), F.mse_loss, X, Y)


def test_a_kernel_that_drops_the_state_is_not_excused_by_resets_elsewhere():
    resets = torch.zeros(12, 3, dtype=torch.bool)
    resets[4] = True  # every row, but not at the step of the loss
    resets[-1, 0] = True  # and one row there
    dead = Wrapped(change_in=torch.Tensor.detach)
    with pytest.raises(ValueError, match="no gradient reaches the state"):
        at.probe(dead, F.mse_loss, X, Y, resets=resets)
    assert at.probe(Wrapped(), F.mse_loss, X, Y, resets=resets).lags == 12


def test_a_loss_that_does_not_depend_on_the_model():
    constant = Wrapped().requires_grad_(False)
    with pytest.raises(ValueError, match="no gradient reaches the state"):
        at.probe(constant, lambda o, t: t.mean(), X, Y)


def test_a_state_that_carries_no_gradient():
    with pytest.raises(ValueError, match="carries no gradient"):
        at.probe(Wrapped(change_out=torch.Tensor.detach), F.mse_loss, X, Y)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_name_the_step(value):
    x = X.clone()
    x[7, 1, 0] = value
    with pytest.raises(ValueError, match="at step 7"):
        at.probe(nn.LSTM(2, 4), F.mse_loss, x, Y)


def test_a_gradient_that_is_not_finite_names_the_lag():
    class Explodes(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x, state):
            h = x.new_zeros(x.shape[1], 1) if state is None else state
            for _ in x:
                h = 1e20 * self.w * h
            return h, h

    # 1e20, 1e40 = inf in float32: lag 2.
    with pytest.raises(ValueError, match="at lag 2"):
        at.probe(Explodes(), lambda o, t: o.mean(), X, Y)


def test_a_gradient_that_is_not_finite_at_the_readout_is_lag_0():
    # sqrt at 0: the loss is 0, its slope infinite.
    with pytest.raises(ValueError, match="at lag 0"):
        at.probe(nn.LSTM(2, 4), lambda o, t: (0 * o).sqrt().mean(), X, Y)


def test_inference_mode():
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference mode"):
        at.probe(nn.LSTM(2, 4), F.mse_loss, X, Y)


def test_data_that_are_no_tensors():
    with pytest.raises(TypeError, match=r"inputs must be a tensor.*ndarray"):
        at.probe(nn.LSTM(2, 4), F.mse_loss, X.numpy(), Y)
    with pytest.raises(TypeError, match=r"targets must be a tensor.*ndarray"):
        at.SequenceStream(X, Y.numpy())


def test_resets_that_are_no_booleans():
    with pytest.raises(TypeError, match="boolean"):
        at.probe(nn.LSTM(2, 4), F.mse_loss, X, Y, resets=torch.zeros(12, 3))


def test_features_that_are_not_one_tensor():
    class Twice(Wrapped):
        def core(self, x, state):
            out, state = self.rnn(x, state)
            return (out, out), state

        def head(self, features):
            return features[0]

    with pytest.raises(TypeError, match="features as one tensor, got tuple"):
        at.probe(Twice(), F.mse_loss, X, Y)


def test_a_loss_that_is_not_finite():
    with pytest.raises(ValueError, match="the loss is nan"):
        at.probe(nn.LSTM(2, 4), lambda o, t: o.mean() * float("nan"), X, Y)


def test_a_loss_that_is_not_a_scalar():
    with pytest.raises(ValueError, match="must return a scalar"):
        at.probe(nn.LSTM(2, 4), lambda o, t: F.mse_loss(o, t, reduction="none"), X, Y)


def test_rows_that_depend_on_each_other():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.rnn = nn.BatchNorm1d(2), nn.RNN(2, 4)

        def forward(self, x, state):
            return self.rnn(self.norm(x.flatten(0, 1)).view_as(x), state)

    with pytest.raises(ValueError, match="'norm' is batch normalisation in training mode"):
        at.probe(Normed(), F.mse_loss, X, Y)
    assert at.probe(Normed(), F.mse_loss, X, Y, train=False).lags == 12

    class Mixes(Wrapped):
        def forward(self, x, state):
            return super().forward(x / x.shape[1], state)

    with pytest.raises(ValueError, match="rows are not independent"):
        at.probe(Mixes(), F.mse_loss, X, Y)


def test_a_state_of_another_batch_size():
    with pytest.raises(ValueError, match=r"\(1, 5, 4\); RNN carries \(1, 3, 4\) for 3 rows"):
        at.probe(nn.RNN(2, 4), F.mse_loss, X, Y, state=torch.zeros(1, 5, 4))
    with pytest.raises(ValueError, match=r"1 tensors \(.*that of LSTM has 2"):
        at.probe(nn.LSTM(2, 4), F.mse_loss, X, Y, state=torch.zeros(1, 3, 4))
    with pytest.raises(ValueError, match=r"has shape \(3,\); .* dimension 1 counts the rows"):
        at.probe(nn.RNN(2, 4), F.mse_loss, X, Y, state=torch.zeros(3))


def test_targets_shorter_than_inputs():
    with pytest.raises(ValueError, match=r"targets have \(time, batch\) = \(11, 3\)"):
        at.probe(nn.RNN(2, 4), F.mse_loss, X, Y[:-1])
    with pytest.raises(ValueError, match=r"targets have"):
        at.SequenceStream(X, Y[:, :2])
    with pytest.raises(ValueError, match=r"must be \(time, batch"):
        at.SequenceStream(torch.zeros(5), torch.zeros(5))


def test_modules_that_cannot_be_truncated():
    with pytest.raises(ValueError, match="reads the future"):
        at.probe(nn.LSTM(2, 4, bidirectional=True), F.mse_loss, X, Y)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        at.probe(lambda x, s: (x, s), F.mse_loss, X, Y)

    class Extra(Wrapped):
        def forward(self, x, state):
            return (*super().forward(x, state), "extra")

    with pytest.raises(TypeError, match=r"must return \(outputs, state\)"):
        at.probe(Extra(), F.mse_loss, X, Y)

    class Stateless(nn.Linear):
        def forward(self, x, state):
            return super().forward(x), None

    with pytest.raises(ValueError, match="without tensors"):
        at.probe(Stateless(2, 4), F.mse_loss, X, Y)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tau": 10}, "a lag in"),
        ({"tau": 1.0}, "a fraction in"),
        ({"tau": True}, "int"),
        ({"method": "median"}, "one of ols, max, quantile"),
    ],
)
def test_options_of_the_fit(options, says):
    with pytest.raises((ValueError, TypeError), match=says):
        at.fit_decay(0.5 ** np.arange(11.0), **options)


def test_curves_that_are_no_norms():
    with pytest.raises(ValueError, match="at lag 3"):
        at.fit_decay([1.0, 0.5, 0.2, np.nan, 0.1])
    with pytest.raises(ValueError, match="at lag 2"):
        at.fit_decay([1.0, 0.5, -0.2])
    with pytest.raises(ValueError, match="at least two lags"):
        at.fit_decay([1.0])
    fit = at.fit_decay(0.5 ** np.arange(11.0))
    with pytest.raises(ValueError, match="more than tau = 9 lags"):
        at.bias_bound(np.ones(5), fit)
    with pytest.raises(ValueError, match="like phi"):
        at.bias_bound(0.5 ** np.arange(11.0), fit, gradient_norms=np.ones(3))
