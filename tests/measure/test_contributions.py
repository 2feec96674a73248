"""c_k against a brute-force twin in which every lag has its own copy of the parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import adaptive_tbptt as at
from adaptive_tbptt.measure.affine_uses import trained
from adaptive_tbptt.measure.sketch import Sketch
from adaptive_tbptt.model.recurrent import as_recurrent

from ..symbol_models import LanguageModel, SymbolModel, symbol_loss

WINDOW, ROWS, SIZE = 7, 3, 16


class OfLinearMaps(nn.Module):
    """A recurrence written by hand: all of its parameters enter affine maps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 5), nn.Linear(5, 5, bias=False)
        self.readout = nn.Linear(5, 2)

    def forward(self, inputs: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = inputs.new_zeros(inputs.shape[1], 5) if state is None else state
        out = []
        for x in inputs:
            h = torch.tanh(self.inner(x) + self.outer(h))
            out.append(h)
        return self.readout(torch.stack(out)), h


class Padded(nn.Module):
    """An embedding whose row 0 is padding and never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(4, 3, padding_idx=0), nn.GRU(3, 4)

    def forward(self, inputs: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.recurrent(self.embedding(inputs), state)


def padded_data():
    inputs, targets = symbol_data(4)
    inputs[:-2, 0] = inputs[:4, 1] = 0  # seen by the window, not by the steps that choose a path
    inputs[-4:, :2] = inputs[-4:, :2].clamp_min(1)
    return inputs, targets


class OfOtherMaps(nn.Module):
    """A decay per unit, and a matrix that enters twice per step: nothing is an outer product."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.randn(5))
        self.mix = nn.Parameter(torch.randn(5, 5) / 2)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, inputs: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = inputs.new_zeros(inputs.shape[1], 5) if state is None else state
        out = []
        for x in inputs:
            wide = torch.nn.functional.pad(x, (0, 2))
            h = torch.sigmoid(self.decay) * h + torch.tanh(wide @ self.mix + h @ self.mix)
            out.append(h * self.scale)
        return torch.stack(out), h


class OfCells(nn.Module):
    """Cells called step by step, the second of torch's own: its parameters enter as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(3, 4), nn.LSTMCell(4, 5)

    def forward(self, inputs: Tensor, state=None):
        if state is None:
            rows = inputs.shape[1]
            state = [tuple(inputs.new_zeros(2, rows, n)) for n in (4, 5)]
        low, high = state
        out = []
        for x in inputs:
            low = self.first(x, low)
            high = self.second(low[0], high)
            out.append(high[0])
        return torch.stack(out), [low, high]


class OfTwoLayers(nn.Module):
    """Two of torch's own layers: neither is all of the recurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.GRU(3, 4), nn.LSTM(4, 5)

    def forward(self, inputs: Tensor, state=None):
        low, high = (None, None) if state is None else state
        features, low = self.low(inputs, low)
        features, high = self.high(features, high)
        return features, (low, high)


class Transposed(OfLinearMaps):
    """A matrix that enters as its transpose, spelt as an attribute, twice over."""

    def forward(self, inputs: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = inputs.new_zeros(inputs.shape[1], 5) if state is None else state
        out = []
        for x in inputs:
            h = torch.tanh(self.inner(x) + h @ self.outer.weight.T.T.T)
            out.append(h)
        return self.readout(torch.stack(out)), h


def reservoir():
    model = LanguageModel(4, 5, tied=False)
    model.recurrent.requires_grad_(False)
    model.embedding.requires_grad_(False)
    return model


def float_data(features: int, outputs: int):
    return torch.randn(WINDOW, ROWS, features), torch.randn(WINDOW, ROWS, outputs)


def symbol_data(symbols: int):
    return torch.randint(symbols, (WINDOW, ROWS)), torch.randint(symbols, (WINDOW, ROWS))


MSE = nn.functional.mse_loss
CASES = {
    "rnn": lambda: (nn.RNN(3, 5), MSE, *float_data(3, 5)),
    "relu": lambda: (nn.RNN(3, 5, nonlinearity="relu", bias=False), MSE, *float_data(3, 5)),
    "gru": lambda: (nn.GRU(3, 5, 2), MSE, *float_data(3, 5)),
    "lstm": lambda: (nn.LSTM(3, 5), MSE, *float_data(3, 5)),
    "lstm of two layers": lambda: (nn.LSTM(3, 5, 2), MSE, *float_data(3, 5)),
    "projection": lambda: (nn.LSTM(3, 5, 2, proj_size=4), MSE, *float_data(3, 4)),
    "cell": lambda: (nn.GRUCell(3, 5), MSE, *float_data(3, 5)),
    "linear maps": lambda: (OfLinearMaps(), MSE, *float_data(3, 2)),
    "cells in a loop": lambda: (OfCells(), MSE, *float_data(3, 5)),
    "two layers": lambda: (OfTwoLayers(), MSE, *float_data(3, 5)),
    "transposed": lambda: (Transposed(), MSE, *float_data(3, 2)),
    "frozen recurrence": lambda: (reservoir(), symbol_loss, *symbol_data(4)),
    "other maps": lambda: (OfOtherMaps(), MSE, *float_data(3, 5)),
    "linear encoder": lambda: (SymbolModel(4, 5), symbol_loss, *symbol_data(4)),
    "padding": lambda: (Padded(), symbol_loss, *padded_data()),
    "embedding": lambda: (SymbolModel(4, 5, 1, "gru", "embedding"), symbol_loss, *symbol_data(4)),
    "tied head": lambda: (LanguageModel(4, 5), symbol_loss, *symbol_data(4)),
    "tied head, two layers": lambda: (
        LanguageModel(4, 5, 2, "rnn"),
        symbol_loss,
        *symbol_data(4),
    ),
}
NOT_RECORDED = {"cell", "cells in a loop", "two layers", "transposed", "other maps"}


@pytest.fixture(params=CASES, autouse=False)
def case(request):
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    try:
        yield request.param, *CASES[request.param]()
    finally:
        torch.set_default_dtype(torch.float32)


def twin(model, loss_fn, inputs, targets):
    """Return, for every lag and row, the gradient of every parameter's copy at that lag."""
    recurrent = as_recurrent(model)
    start = recurrent.initial_state(inputs)
    names = list(trained(model))
    found = []
    for row in range(ROWS):
        copies = [
            {n: p.detach().clone().requires_grad_() for n, p in trained(model).items()}
            for _ in range(WINDOW)
        ]
        state = start
        for t, own in enumerate(copies):
            x = inputs[t] if isinstance(model, nn.RNNCellBase) else inputs[t : t + 1]
            result = functional_call(model, own, (x, state), tie_weights=True)
            if isinstance(model, nn.RNNCellBase):
                output, state = result[None], result
            else:
                output, state = result
        # A mean over the rows, so that of one row alone is the same whatever the others are.
        loss = loss_fn(output[:, row : row + 1], targets[-1:, row : row + 1])
        flat = [own[n] for own in reversed(copies) for n in names]
        grads = torch.autograd.grad(loss, flat, allow_unused=True, materialize_grads=True)
        found.append([grads[i : i + len(names)] for i in range(0, len(grads), len(names))])
    return found  # [row][lag][parameter]


@pytest.mark.parametrize("fused", [True, False])
def test_contributions_equal_those_of_the_twin(case, fused):
    _, model, loss_fn, inputs, targets = case
    found = at.probe(model, loss_fn, inputs, targets, sketch=SIZE, fused=fused).contributions
    expected = twin(model, loss_fn, inputs, targets)
    norms = np.array(
        [[float(sum(g.square().sum() for g in lag)) ** 0.5 for lag in row] for row in expected]
    ).T
    np.testing.assert_allclose(found.norms, norms, rtol=1e-8, atol=1e-14)
    sketch = Sketch(trained(model), SIZE)
    for row, lags in enumerate(expected):  # three rows are three groups
        dense = torch.stack([sketch.dense(lag) for lag in lags])
        np.testing.assert_allclose(found.sketches[:, row], dense, rtol=1e-5, atol=1e-7)
    assert found.sizes.tolist() == [1] * ROWS


def test_which_models_are_recorded(case):
    name, model, loss_fn, inputs, targets = case
    recurrent = as_recurrent(model)
    at.probe(recurrent, loss_fn, inputs, targets, parameters=True)
    assert recurrent.affine == (name not in NOT_RECORDED)


@pytest.mark.parametrize("rnn", [nn.LSTM, nn.GRU])
def test_sequences_that_start_inside_the_window_take_the_fast_path_too(double, rnn):
    model = LanguageModel(4, 5, 2, rnn.__name__.lower())
    inputs, targets = symbol_data(4)
    resets = torch.zeros(WINDOW, ROWS, dtype=torch.bool)
    resets[2, 0] = resets[2, 1] = resets[5, 1] = resets[6, 2] = resets[0, 2] = True
    fast, slow = (
        at.probe(model, symbol_loss, inputs, targets, resets=resets, sketch=SIZE, fused=fused)
        for fused in (True, False)
    )
    np.testing.assert_allclose(fast.state_norms, slow.state_norms, rtol=1e-8, atol=1e-14)
    ours, theirs = fast.contributions, slow.contributions
    np.testing.assert_allclose(ours.norms, theirs.norms, rtol=1e-8, atol=1e-14)
    np.testing.assert_allclose(ours.sketches, theirs.sketches, rtol=1e-5, atol=1e-7)
    assert not ours.norms[2:, 1].any()  # row 1 starts at step 5: nothing reaches beyond lag 1
    assert ours.norms[:2, 1].all()


class Beside(nn.Module):
    """A linear map beside the layer, run before it."""

    def __init__(self):
        super().__init__()
        self.beside, self.layer = nn.Linear(3, 4), nn.GRU(3, 4)

    def forward(self, x, state):
        beside = self.beside(x)
        h, state = self.layer(x, state)
        return h + beside, state


class Learned(nn.Module):
    """Starts from a state that is learned."""

    def __init__(self):
        super().__init__()
        self.layer, self.start = nn.GRU(3, 4), nn.Parameter(torch.randn(1, 1, 4))

    def initial_state(self, rows):
        return self.start.expand(1, rows, 4).contiguous()

    def forward(self, x, state):
        return self.layer(x, self.initial_state(x.shape[1]) if state is None else state)


@pytest.mark.parametrize("make", [Beside, Learned])
def test_what_recording_cannot_see_is_measured_row_by_row(double, make):
    model, (x, y) = make(), float_data(3, 4)
    resets = torch.zeros(x.shape[:2], dtype=torch.bool)
    resets[-3, 1] = True
    fast, slow = (
        at.probe(model, MSE, x, y, resets=resets, parameters=True, fused=fused)
        for fused in (True, False)
    )
    np.testing.assert_allclose(fast.contributions.norms, slow.contributions.norms, rtol=1e-8)


def test_a_part_that_is_unfrozen_later_is_found_out(double):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.GRU(3, 4), nn.LayerNorm(4)

        def forward(self, x, state):
            h, state = self.layer(x, state)
            return self.norm(h), state

    model, (x, y) = Normed(), float_data(3, 4)
    model.norm.requires_grad_(False)
    recurrent = as_recurrent(model)
    at.probe(recurrent, MSE, x, y, parameters=True)
    assert recurrent.affine
    model.norm.requires_grad_(True)
    again = at.probe(recurrent, MSE, x, y, parameters=True)
    expected = at.probe(model, MSE, x, y, parameters=True, fused=False)
    np.testing.assert_allclose(again.contributions.norms, expected.contributions.norms, rtol=1e-8)


def test_a_kernel_that_is_unfrozen_later_is_found_out(double):
    class Hidden(OfLinearMaps):
        """Its matrix enters in a way that is not seen."""

        def forward(self, inputs, state=None):
            h = inputs.new_zeros(inputs.shape[1], 5) if state is None else state
            out = []
            for x in inputs:
                h = torch.tanh(self.inner(x) + h @ self.outer.weight.H)
                out.append(h)
            return self.readout(torch.stack(out)), h

    model, (x, y) = Hidden(), float_data(3, 2)
    model.outer.requires_grad_(False)
    recurrent = as_recurrent(model)
    at.probe(recurrent, MSE, x, y, parameters=True)
    assert recurrent.affine
    with pytest.raises(ValueError, match="loss is nan"):
        at.probe(recurrent, lambda o, t: MSE(o, t) * float("nan"), x, y, parameters=True)
    model.outer.requires_grad_(True)
    with pytest.raises(ValueError, match="loss is nan"):  # which must decide nothing
        at.probe(recurrent, lambda o, t: MSE(o, t) * float("nan"), x, y, parameters=True)
    again = at.probe(recurrent, MSE, x, y, parameters=True)
    expected = at.probe(model, MSE, x, y, parameters=True, fused=False)
    np.testing.assert_allclose(again.contributions.norms, expected.contributions.norms, rtol=1e-8)


def test_an_embedding_scaled_by_frequency_is_not_recorded(double):
    model = SymbolModel(4, 5, 1, "gru", "embedding")
    model.encoder = nn.Embedding(4, 4, scale_grad_by_freq=True)
    recurrent = as_recurrent(model)
    at.probe(recurrent, symbol_loss, *symbol_data(4), parameters=True)
    assert recurrent.affine is False


def test_a_small_loss_hides_no_mismatch(double):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = (
                nn.Parameter(torch.randn(3, 3) / 2),
                nn.Parameter(torch.ones(3)),
            )

        def forward(self, inputs, state=None):
            h = torch.zeros_like(inputs[0]) if state is None else state
            out = []
            for x in inputs:
                h = torch.tanh(x + h @ self.weight.H + self.bias)
                out.append(h)
            return torch.stack(out), h

    model, (x, y) = Hidden(), float_data(3, 3)
    recurrent = as_recurrent(model)
    at.probe(recurrent, lambda o, t: 1e-9 * MSE(o, t), x, y, parameters=True)
    assert recurrent.affine is False


def test_lag_0_under_dropout_between_sublayers(double):
    """Two units between the sublayers are dropped in four ways: no row may mix two of them."""
    rows, model = 60, nn.GRU(3, 2, 2, dropout=0.5)
    x, y = (torch.randn(5, 1, n).expand(5, rows, n) for n in (3, 2))
    resets = torch.zeros(5, rows, dtype=torch.bool)
    resets[-1] = True  # so that earlier masks do not matter
    fast, slow = (
        at.probe(model, MSE, x, y, resets=resets, parameters=True, fused=fused).contributions
        for fused in (True, False)
    )
    ways = np.unique(slow.norms[0].round(10))
    assert len(ways) == 4
    assert set(fast.norms[0].round(10)) <= set(ways)


@pytest.mark.parametrize("make", [lambda: nn.LSTM(3, 5), OfOtherMaps])
def test_rows_that_a_mask_leaves_out_are_not_run_alone(double, make):
    model, (x, y) = make(), float_data(3, 5)
    mask = torch.ones(y.shape[:2])
    mask[:, 0] = 0.0

    def loss_fn(outputs, targets):
        y, mask = targets
        return ((outputs - y).square().mean(-1) * mask).sum() / mask.sum()

    found = at.probe(
        model, loss_fn, x, (y, mask), parameters=True, count_losses=lambda t: float(t[1].sum())
    ).contributions
    assert (found.norms[:, 0] == 0.0).all()
    assert np.isfinite(found.norms).all()
    assert (found.norms[:, 1:] > 0.0).all()
