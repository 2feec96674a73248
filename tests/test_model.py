import pytest
import torch
from torch import nn

import adaptive_tbptt as at

from .oracle import CoreHead, DictState

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
    recurrent = at.as_recurrent(module)
    assert recurrent.dims(X) == dims
    start = recurrent.initial_state(X)
    with_none, explicit = recurrent.core(X[:1], None)[0], recurrent.core(X[:1], start)[0]
    if not (isinstance(module, nn.GRU) and module.dropout):
        torch.testing.assert_close(with_none, explicit)


def test_learning_the_layout_disturbs_nothing():
    module = nn.GRU(2, 4, 2, dropout=0.5)
    random = torch.get_rng_state()
    at.as_recurrent(module).dims(X)
    assert module.training
    assert torch.equal(random, torch.get_rng_state())


def test_the_batch_dimension_can_be_given():
    class Square(nn.Module):
        """State (rows, rows-independent 2): found; given by hand it is the same."""

        def forward(self, x, state):
            state = x.new_zeros(x.shape[1], 2) if state is None else state
            return state + x.sum(0), state + x.sum(0)

    assert at.as_recurrent(Square(), state_batch_dim=0).dims(X) == [0]


def test_wrapping_twice_is_wrapping_once():
    recurrent = at.as_recurrent(nn.RNN(2, 4))
    assert at.as_recurrent(recurrent) is recurrent


def test_cells_run_over_time_like_layers():
    cell, layer = nn.LSTMCell(2, 4), nn.LSTM(2, 4)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        getattr(layer, f"{name}_l0").data = getattr(cell, name).data
    ours, (h, _) = at.as_recurrent(cell).core(X, None)
    theirs, (h_layer, _) = layer(X)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(h, h_layer[0])
