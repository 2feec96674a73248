"""The bias at a given K: a recurrence whose bias has a closed form, brute force, bad input."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at

STEPS, ROWS = 400, 4


class Leaks(nn.Module):
    """h_t = a h_{t-1} + w x_t, each unit with a decay of its own: every gradient is known."""

    def __init__(self, decays):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(decays))
        self.w = nn.Parameter(torch.ones(len(decays)))

    def forward(self, inputs, state=None):
        h = inputs.new_zeros(inputs.shape[1], len(self.a)) if state is None else state
        out = []
        for x in inputs:
            h = self.a * h + self.w * x
            out.append(h)
        return torch.stack(out), h


def closed_form(decays, weights, context, losses, lags):
    """The relative bias where x = 1 and h is at rest.

    The loss j steps after the first sees lags 0..c+j, and lag k adds a^k: to the gradient of w
    times v, to that of a times v h.
    """
    a, v = np.array(decays), np.array(weights)

    def kept(c):
        return np.mean([(1 - a ** (c + j + 1)) / (1 - a) for j in range(losses)], axis=0)

    size = v**2 * (1 + (1 / (1 - a)) ** 2)
    missing, whole = kept(lags) - kept(context), kept(lags)
    return math.sqrt((size * missing**2).sum() / (size * whole**2).sum())


def constant_stream():
    return at.SequenceStream(torch.ones(STEPS, ROWS, 1), torch.zeros(STEPS, ROWS, 1))


def along(weights):
    v = torch.tensor(weights)
    return lambda outputs, targets: (outputs @ v).mean() + 0.0 * targets.sum()


DECAYS, WEIGHTS = [0.5, 0.8, 0.95], [1.0, -0.5, 0.2]


@pytest.mark.parametrize("losses", [1, 5, 35])
def test_the_bias_of_a_linear_recurrence_has_a_closed_form(losses):
    ks = [0, 1, 3, 10, 40]
    found = at.check_bias(
        Leaks(DECAYS), along(WEIGHTS), constant_stream(), ks, losses=losses, lags=80, segments=8,
        burn_in=250,
    )  # fmt: skip
    for check, k in zip(found, ks, strict=True):
        expected = closed_form(DECAYS, WEIGHTS, k, losses, 80)
        assert check.relative == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert (check.low, check.high) == pytest.approx((expected, expected), rel=1e-3, abs=1e-5)
        assert (check.k, check.losses, check.lags) == (k, losses, 80)
        assert check.samples == 8 * losses * ROWS


def test_of_one_unit_it_is_a_power_of_its_decay():
    """Single losses and one decay: what is cut at K is a^(K+1) of everything."""
    for check in at.check_bias(
        Leaks([0.8]), along([1.0]), constant_stream(), [3, 10], lags=80, segments=8, burn_in=100
    ):
        assert check.relative == pytest.approx(0.8 ** (check.k + 1), rel=1e-4)


def test_the_diagnosis_of_a_linear_recurrence_has_the_same_closed_form():
    sampling = at.diagnosis.Sampling(burn_in=200)
    found = at.diagnose(
        Leaks(DECAYS), along(WEIGHTS), constant_stream(), losses=10, lags=64, segments=8,
        sampling=sampling,
    )  # fmt: skip
    assert [row.context for row in found.rows] == [0, 1, 2, 4, 8, 16, 32]
    for row in found.rows:
        expected = closed_form(DECAYS, WEIGHTS, row.context, 10, 64)
        assert row.bias == pytest.approx(expected, rel=1e-4)
    beyond = closed_form(DECAYS, WEIGHTS, 64, 10, 4000)
    assert found.curve.tail == pytest.approx(beyond, rel=0.1)  # one decay stands for three


def learns_to_remember(steps=600, rows=32):
    torch.manual_seed(4)
    x = torch.randn(steps, rows, 2)
    targets = torch.cumsum(x, 0)[..., :1].tanh().expand(-1, -1, 6)
    return nn.GRU(2, 6), x, targets


def test_check_and_gauge_agree_on_a_model_that_neither_knows():
    model, x, targets = learns_to_remember()
    stream = at.SequenceStream(x, targets)
    gauge = at.truncate.MeasuredGauge(budget=at.truncate.ProbeBudget(8, 32, 0))
    rule = at.BiasTolerance(0.3, k_max=32, lags=40, gauge=gauge)
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, rule, burn_in=10, losses=1)
    tbptt.estimate(stream)
    curve = tbptt.truncation.curve
    assert not curve.hidden
    for check in at.check_bias(model, F.mse_loss, stream, [1, 2, 4], lags=40, seed=1):
        low, high = curve.interval_at(check.k)
        assert check.low <= high
        assert low <= check.high


@pytest.mark.parametrize("losses", [1, 6])
def test_what_is_measured_is_what_all_windows_of_the_data_say(losses):
    """Brute force: the gradients of every window that could be drawn, by plain autograd."""
    model, x, y = learns_to_remember(steps=80, rows=16)
    lags, burn_in, ks = 16, 8, [0, 2, 8]
    objective = at.model.Objective.of(model, F.mse_loss)
    parameters = list(model.parameters())
    totals = {k: 0.0 for k in [*ks, lags]}
    for first in range(burn_in + lags, 80 - losses + 1):
        for k in totals:
            with torch.no_grad():
                _, state = model(x[first - lags - burn_in : first - k])
            out, _ = model(x[first - k : first + losses], state)
            loss = objective.loss_fn(out[k:], y[first : first + losses])
            grads = torch.autograd.grad(loss, parameters)
            totals[k] = totals[k] + torch.cat([g.flatten() for g in grads]).double()
    whole = totals[lags]
    truth = {k: float((whole - totals[k]).norm() / whole.norm()) for k in ks}
    found = at.check_bias(
        model, F.mse_loss, (x, y), ks, losses=losses, lags=lags, segments=150, burn_in=burn_in
    )
    for check in found:
        width = check.high - check.low
        # Twice the interval: once in a thousand, not once in ten.
        assert check.low - width / 2 <= truth[check.k] <= check.high + width / 2
        assert width < 0.5 * truth[check.k]
        assert check.relative == pytest.approx(truth[check.k], rel=0.15)


def test_a_check_with_too_few_segments_is_refused():
    data = torch.randn(60, 2, 2), torch.zeros(60, 2, 3)
    for level, needed in ((0.9, 6), (0.99, 9)):
        with pytest.raises(ValueError, match=f"at least {needed} segments"):
            at.check_bias(
                nn.RNN(2, 3), F.mse_loss, data, 2, lags=10, segments=needed - 1, level=level
            )
        at.check_bias(
            nn.RNN(2, 3), F.mse_loss, data, np.int64(2), lags=10, segments=needed, level=level
        )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"k": 10}, r"k must be in \[0, 9\], below the lags, got 10"),
        ({"k": -1}, "got -1"),
        ({"k": [3, 12]}, "got 12"),
        ({"k": 3, "losses": 0}, "losses and segments must be at least 1"),
        ({"k": 3, "level": 1.0}, r"level must be in \(0, 1\)"),
        ({"k": 3, "lags": 100}, "does not fit into a stream of 60"),
    ],
)
def test_options_are_checked(options, says):
    data = torch.randn(60, 2, 2), torch.zeros(60, 2, 3)
    with pytest.raises(ValueError, match=says):
        at.check_bias(nn.RNN(2, 3), F.mse_loss, data, **{"lags": 10, "segments": 8, **options})


def test_a_verdict_is_kept_broken_or_open():
    check = at.diagnosis.BiasCheck(4, 1, 0.1, 0.08, 0.12, 0.9, 640, 100)
    assert check.verdict(0.13) == check.verdict(0.12) == "kept"
    assert check.verdict(0.07) == "broken"
    assert check.verdict(0.1) == "not resolved"
    assert str(check) == "K=4: relative bias 0.1 [0.08, 0.12], 640 losses against 100 lags"
    hidden = at.diagnosis.BiasCheck(4, 1, math.nan, 0.0, math.inf, 0.9, 640, 100)
    assert hidden.verdict(0.99) == "not resolved"
    assert str(hidden) == "K=4: noise hides the gradient of 640 losses"


def test_noise_that_hides_the_gradient_is_an_outcome():
    """Targets that no output could meet better: the mean gradient is zero."""
    torch.manual_seed(0)
    model = Leaks([0.5, 0.5])

    def loss(outputs, targets):
        return (outputs * targets).mean()

    data = torch.randn(300, 2, 1), torch.randn(300, 2, 2)
    (check,) = at.check_bias(model, loss, data, 2, lags=20, segments=8)
    assert math.isinf(check.high)
    assert math.isnan(check.relative)


def test_the_same_seed_draws_the_same():
    model, x, y = learns_to_remember(steps=200, rows=4)

    def check(seed):
        return at.check_bias(model, F.mse_loss, (x, y), 4, lags=20, segments=8, seed=seed)

    assert str(check(3)) == str(check(3)) != str(check(4))


def test_more_segments_narrow_the_interval():
    model, x, y = learns_to_remember()
    (few,), (many,) = (
        at.check_bias(model, F.mse_loss, (x, y), 2, lags=20, segments=n) for n in (16, 144)
    )
    assert many.high - many.low < 0.6 * (few.high - few.low)
