import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at
from adaptive_tbptt._torch.number_formats import flushed_denormals

pytestmark = pytest.mark.skipif(
    not torch.set_flush_denormal(False), reason="this processor cannot flush denormals"
)


def is_flushing():
    """Tell whether this thread flushes: torch has no getter, half the smallest number tells."""
    return sys.float_info.min / 2 == 0.0


@pytest.fixture(autouse=True)
def _restored():
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_flag_is_put_back_as_it_was(before, dtype):
    torch.set_default_dtype(dtype)
    torch.set_flush_denormal(before)
    with flushed_denormals():
        assert is_flushing()
    torch.set_default_dtype(torch.float32)
    assert is_flushing() is before
    with pytest.raises(ZeroDivisionError), flushed_denormals():
        raise ZeroDivisionError
    assert is_flushing() is before


def test_probe_and_training_flush_inside_only():
    seen = []

    def loss(outputs, targets):
        seen.append(is_flushing())
        return F.mse_loss(outputs, targets)

    x, y = torch.randn(30, 2, 3), torch.randn(30, 2, 4)
    at.probe(nn.GRU(3, 4), loss, x, y)
    assert seen == [True]
    model = nn.GRU(3, 4)
    (window,) = at.AdaptiveTBPTT(model, loss, at.FixedTruncation(30)).windows(
        at.SequenceStream(x, y)
    )
    seen.clear()  # the look at the first window measures no gradient: it need not flush
    hooked = []
    model.weight_hh_l0.register_hook(lambda g: hooked.append(is_flushing()))
    window.backward()
    assert seen == [True]
    assert hooked == [True]  # the backward pass itself, in the thread it runs in
    assert not is_flushing()
