import numpy as np
import pytest
import torch
from torch import nn

import adaptive_tbptt as at

from ..oracle import CoreHead, DictState

X = torch.randn(5, 3, 2)


@pytest.mark.parametrize(
    ("module", "dims"),
    [
        (nn.RNN(2, 4), [1]),
        (nn.GRU(2, 4, 2, dropout=0.5), [1]),
        (nn.LSTM(2, 4, 3), [1, 1]),
        (nn.GRUCell(2, 4), [0]),
        (nn.LSTMCell(2, 4), [0, 0]),
        (DictState(2), [0, 0, 0]),
        (CoreHead(nn.LSTM(2, 4), 4), [1, 1]),
    ],
)
def test_layout_and_initial_state(module, dims):
    recurrent = at.model.as_recurrent(module)
    assert recurrent.dims(X) == dims
    start = recurrent.initial_state(X)
    with_none, explicit = recurrent.core(X[:1], None)[0], recurrent.core(X[:1], start)[0]
    if not (isinstance(module, nn.GRU) and module.dropout):
        torch.testing.assert_close(with_none, explicit)


def test_learning_the_layout_disturbs_nothing():
    module = nn.GRU(2, 4, 2, dropout=0.5)
    random = torch.get_rng_state()
    at.model.as_recurrent(module).dims(X)
    assert module.training
    assert torch.equal(random, torch.get_rng_state())


def test_the_batch_dimension_can_be_given():
    class Square(nn.Module):
        """State (rows, rows-independent 2): found; given by hand it is the same."""

        def forward(self, x, state):
            state = x.new_zeros(x.shape[1], 2) if state is None else state
            return state + x.sum(0), state + x.sum(0)

    assert at.model.as_recurrent(Square(), state_batch_dim=0).dims(X) == [0]


def test_wrapping_twice_is_wrapping_once():
    recurrent = at.model.as_recurrent(nn.RNN(2, 4))
    assert at.model.as_recurrent(recurrent) is recurrent


def test_cells_run_over_time_like_layers():
    cell, layer = nn.LSTMCell(2, 4), nn.LSTM(2, 4)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        getattr(layer, f"{name}_l0").data = getattr(cell, name).data
    ours, (h, _) = at.model.as_recurrent(cell).core(X, None)
    theirs, (h_layer, _) = layer(X)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(h, h_layer[0])


@pytest.mark.parametrize("make", [nn.RNNCell, nn.LSTMCell])
def test_a_cell_reads_and_returns_batch_first_where_asked(make):
    cell = make(2, 4)
    y = torch.randn(5, 3, 4)
    plain, swapped = at.model.Recurrent(cell), at.model.Recurrent(cell, batch_first=True)
    torch.testing.assert_close(swapped.core(X, None)[0], plain.core(X, None)[0].transpose(0, 1))
    ours = at.probe(plain, nn.functional.mse_loss, X, y)
    theirs = at.probe(swapped, nn.functional.mse_loss, X.transpose(0, 1), y.transpose(0, 1))
    np.testing.assert_allclose(theirs.state_norms, ours.state_norms, rtol=1e-5)


def test_a_wrapped_model_may_change_its_number_format():
    model, y = nn.LSTM(2, 4), torch.zeros(5, 3, 4)
    recurrent = at.model.Recurrent(model)
    at.probe(recurrent, nn.functional.mse_loss, X, y)
    model.double()
    again = at.probe(recurrent, nn.functional.mse_loss, X.double(), y.double())
    fresh = at.probe(model, nn.functional.mse_loss, X.double(), y.double())
    np.testing.assert_array_equal(again.state_norms, fresh.state_norms)
    assert again.floor == fresh.floor


def test_a_batch_dimension_that_the_state_does_not_have():
    with pytest.raises(ValueError, match=r"state_batch_dim=3 does not exist.*\(1, 1, 4\)"):
        at.model.as_recurrent(nn.RNN(2, 4), state_batch_dim=3).dims(X)


class Leaky(nn.Module):
    """h_t = h_{t-1} / 2 + x_t, with what a test changes about inputs and state."""

    def __init__(self, change=lambda x: x, extra=None):
        super().__init__()
        self.change, self.extra = change, extra

    def forward(self, x, state):
        h, extra = (x.new_zeros(x.shape[1], 2), self.extra) if state is None else state
        for xt in self.change(x):
            h = 0.5 * h + xt
            extra = None if extra is None else extra + 1
        return h, (h, extra)


def test_a_state_without_a_batch_dimension_is_refused():
    class Shared(Leaky):
        def forward(self, x, state):
            h = x.new_zeros(2) if state is None else state
            return h, 0.5 * h + x.mean((0, 1))

    with pytest.raises(ValueError, match="no part of the state has a batch dimension"):
        at.model.as_recurrent(Shared()).dims(X)


def test_a_counter_that_is_no_tensor_cannot_be_set_to_zero():
    # Zeroing its tensors leaves the counter where one step brought it: that is not the start.
    with pytest.raises(ValueError, match="initial_state"):
        at.model.as_recurrent(Leaky(extra=0)).initial_state(X)
    model = Leaky(extra=0)
    model.initial_state = lambda rows: (torch.zeros(rows, 2), 0)
    assert at.model.as_recurrent(model).initial_state(X)[1] == 0
    assert at.model.as_recurrent(Leaky()).initial_state(X)[0].shape == (3, 2)


def test_rows_mixed_in_a_way_that_equal_rows_would_not_show():
    with pytest.raises(ValueError, match="rows are not independent"):
        at.model.as_recurrent(Leaky(lambda x: x - x.mean(dim=1, keepdim=True))).dims(X)


def test_a_learned_start_needs_to_be_told_also_while_it_is_zero():
    class Begun(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.h0 = nn.GRU(3, 4), nn.Parameter(torch.zeros(1, 1, 4))

        def forward(self, x, state):
            if state is None:
                state = self.h0.expand(1, x.shape[1], 4).contiguous()
            return self.layer(x, state)

    x = torch.randn(5, 2, 3)
    with pytest.raises(ValueError, match="learns its start"):
        at.model.as_recurrent(Begun()).initial_state(x)
    assert not at.model.as_recurrent(nn.GRU(3, 4)).initial_state(x).any()


def test_zeros_that_ask_for_a_gradient_are_not_learned():
    class Fresh(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.GRU(3, 4)

        def forward(self, x, state):
            if state is None:
                state = torch.zeros(1, x.shape[1], 4, requires_grad=True)
            return self.layer(x, state)

    assert not at.model.as_recurrent(Fresh()).initial_state(torch.randn(5, 2, 3)).any()
