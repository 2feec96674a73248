"""Gradients that leave the range of their number format: marked, scaled, not taken for a decay."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at

from ..oracle import LinearRNN

pytestmark = pytest.mark.usefixtures("double")


def test_float32_underflow_is_marked_not_logged():
    model = LinearRNN(0.3 * torch.eye(2)).float()
    x = torch.zeros(200, 2, 3, dtype=torch.float32)
    profile = at.probe(model, lambda o, t: o.sum() / 2, x, torch.zeros(200, 2))
    marked = profile.underflowed
    assert marked[-1]
    assert not marked[:50].any()
    fit = at.truncate.PaperGauge().fit(profile)
    assert fit.tail == "underflow"
    assert fit.beta == pytest.approx(0.3, rel=1e-5)
    assert fit.last < 80


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_norms_whose_squares_leave_float64(scale):
    model = LinearRNN(0.5 * torch.eye(2))
    profile = at.probe(model, lambda o, t: scale * o.sum(), torch.zeros(5, 1, 3), torch.zeros(5, 1))
    # Both entries of dL/dh_{s-k} are scale * 0.5^k.
    k = np.arange(6)
    np.testing.assert_allclose(profile.state_norms[:, 0] / scale, np.sqrt(2) * 0.5**k, rtol=1e-12)
    sums = np.sqrt(2) * (1 - 0.5**k)
    np.testing.assert_allclose(profile.cumulative_norms / scale, sums, rtol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "floor"),
    [
        (torch.float64, 2.0**-1022 * 2**52),
        (torch.float32, 2.0**-126 * 2**23),
        (torch.bfloat16, 2.0**-126 * 2**7),
        (torch.float16, 2.0**-14 / 2**8),  # 2^8 is what the loss was scaled by
    ],
)
def test_the_floor_is_that_of_the_gradients_number_format(dtype, floor):
    model = LinearRNN(0.5 * torch.eye(2)).to(dtype)
    x = torch.zeros(5, 2, 3, dtype=dtype)
    assert at.probe(model, lambda o, t: o.sum(), x, torch.zeros(5, 2)).floor == floor


def test_the_floor_of_a_state_in_two_formats_is_the_higher_one():
    class Two(nn.Module):
        def forward(self, x, state):
            zero = x.new_zeros(x.shape[1], 1)
            a, b = (zero, zero.float()) if state is None else state
            for xt in x:
                a, b = 0.5 * (a + b) + xt, 0.5 * b
            return a, (a, b)

    x = torch.randn(5, 2, 1)
    assert at.probe(Two(), lambda o, t: o.sum(), x, x).floor == 2.0**-126 * 2**23


def test_the_coarsest_number_format_counts_where_profiles_are_joined():
    x, y = torch.randn(6, 2, 3), torch.randn(6, 2, 4)
    fine = at.probe(nn.GRU(3, 4), F.mse_loss, x, y)
    coarse = replace(fine, floor=1e-4)
    assert at.estimate.LagProfile.concatenate([fine, coarse]).floor == 1e-4
    assert coarse.scaled(100.0).floor == pytest.approx(1e-2)
