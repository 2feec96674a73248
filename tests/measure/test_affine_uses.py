"""Where recording how parameters are used would be wrong, every row is run alone instead."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at

STEPS, ROWS = 12, 6


class Encoded(nn.Module):
    """A linear map, something in between, a GRU and a readout."""

    def __init__(self, between):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.between = nn.Linear(3, 5), between
        self.layer, self.readout = nn.GRU(5, 4), nn.Linear(4, 2)

    def forward(self, x, state):
        features, state = self.layer(self.between(self.encoder(x)), state)
        return self.readout(features), state


def data(scale=1.0):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, ROWS, 5, generator=generator)
    return scale * x[..., :3], x[..., 3:]


def norms(recurrent, inputs, targets, **options):
    torch.manual_seed(2)  # of dropout
    profile = at.probe(
        recurrent, options.pop("loss", F.mse_loss), inputs, targets, parameters=True, **options
    )
    return profile.contributions.norms


def test_dropout_in_place_is_not_recorded():
    model = at.model.as_recurrent(Encoded(nn.Dropout(0.8, inplace=True)).train())
    norms(model, *data())
    assert not model.affine


def test_what_is_changed_in_place_only_later_is_found_out():
    model = at.model.as_recurrent(Encoded(lambda x: F.hardtanh_(x, -1.5, 1.5)))
    norms(model, *data(0.1))  # nothing is clipped here
    alone = norms(model, *data(5.0), fused=False)
    assert norms(model, *data(5.0)) == pytest.approx(alone, rel=1e-4)


def test_what_is_computed_without_gradient_is_no_use():
    class Logged(Encoded):
        def forward(self, x, state):
            with torch.no_grad():
                self.largest = self.encoder(x).abs().max()
            return super().forward(x, state)

    model = at.model.as_recurrent(Logged(nn.Tanh()))
    found = norms(model, *data())
    assert model.affine
    assert found == pytest.approx(norms(model, *data(), fused=False), rel=1e-4)


def test_one_row_does_not_tell_steps_from_rows():
    class Turned(Encoded):
        """Time first outside, batch first inside."""

        def __init__(self):
            super().__init__(nn.Identity())
            self.layer = nn.GRU(5, 4, batch_first=True)

        def forward(self, x, state):
            out, state = super().forward(x.transpose(0, 1), state)
            return out.transpose(0, 1), state

    class Masked(nn.CrossEntropyLoss):
        def forward(self, out, target):
            return super().forward(out.flatten(0, 1), target.flatten())

    inputs = data()[0] * torch.linspace(0.1, 3, ROWS)[:, None]
    targets = torch.randint(2, (STEPS, ROWS), generator=torch.Generator().manual_seed(0))
    single = targets.clone()
    single[-1, 1:] = -100
    model = at.model.as_recurrent(Turned())
    norms(model, inputs, single, loss=Masked())
    alone = norms(model, inputs, targets, loss=Masked(), fused=False)
    assert norms(model, inputs, targets, loss=Masked()) == pytest.approx(alone, rel=1e-4)


def test_weights_that_are_computed_are_not_taken_for_parameters():
    class Dropped(Encoded):
        """The weight dropout of an AWD-LSTM."""

        def __init__(self):
            super().__init__(nn.Identity())
            self.raw = nn.Parameter(self.layer.weight_hh_l0.detach().clone())
            del self.layer._parameters["weight_hh_l0"]
            self.layer.flatten_parameters = lambda: None

        def forward(self, x, state):
            self.layer.weight_hh_l0 = 1.0 * F.dropout(self.raw, 0.5, self.training)
            return super().forward(x, state)

    for train in (False, True):
        model = at.model.as_recurrent(Dropped().train(train))
        found = norms(model, *data(), sketch=16)
        assert not model.affine
        assert (found[:5] > 0).all()
