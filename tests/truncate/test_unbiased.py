"""`Unbiased`: a context that is drawn and weighted, so that on average nothing is cut."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at
from adaptive_tbptt.truncate import unbiased


def outcomes(rule, losses):
    """Every context that may be drawn, with its probability, factors included."""
    levels = ((0, 1.0), *rule.levels(losses, rule.base.k_max), (None, 0.0))
    for (context, p), (_, q) in pairwise(levels):
        if p > q:
            yield context, (p + q) / 2, p - q


@pytest.fixture
def drawn(monkeypatch):
    """Set the number that every window draws."""
    return lambda number: monkeypatch.setattr(unbiased, "draw", lambda seed, window: number)


class Residual(nn.Module):
    """A state that is a dict, read by the output as well, with a Python loop."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(7, 4), nn.Linear(4, 4)

    def forward(self, x, state):
        h = x.new_zeros(x.shape[1], 4) if state is None else state["h"]
        hidden = []
        for step in x:
            h = 0.7 * h + torch.tanh(self.inner(torch.cat([step, h], 1)))
            hidden.append(h)
        return self.out(torch.stack(hidden)), {"h": h}


MODELS = {
    "rnn": lambda: nn.RNN(3, 4),
    "gru, two layers": lambda: nn.GRU(3, 4, 2),
    "lstm": lambda: nn.LSTM(3, 4),
    "cell": lambda: nn.LSTMCell(3, 4),
    "dict": Residual,
}


def window_gradient(model, controller, stream, number):
    """The gradient of one window in the middle of a stream, at the parameters as they are."""
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, controller, losses=5)
    for index, window in enumerate(tbptt.windows(stream)):
        model.zero_grad()
        window.backward()
        if index == number:
            stream.rewind()
            return window, torch.cat([p.grad.flatten() for p in model.parameters()])
    raise AssertionError


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize(
    "rule",
    [
        at.Unbiased(40),
        at.Unbiased(17, share=0.7, fall=0.3),
        at.Unbiased(40, base=at.FixedTruncation(7)),
    ],
)
def test_the_mean_over_all_draws_is_the_gradient_with_the_longest_context(
    name, resets, rule, drawn
):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    starts = torch.rand(80, 2) < 0.04 if resets else None
    stream = at.SequenceStream(
        torch.randn(80, 2, 3).double(), torch.randn(80, 2, 4).double(), starts
    )
    mean, chances = 0.0, 0.0
    for context, number, chance in outcomes(rule, 5):
        drawn(number)
        window, gradient = window_gradient(model, rule, stream, 11)
        assert window.k == context
        mean, chances = mean + chance * gradient, chances + chance
    _, whole = window_gradient(model, at.FixedTruncation(rule.k_max), stream, 11)
    assert chances == pytest.approx(1.0)
    np.testing.assert_allclose(mean, whole, rtol=0, atol=1e-12 * float(whole.norm()))


def test_without_its_weights_the_mean_is_another_one(drawn):
    """The test above can fail."""
    torch.manual_seed(0)
    model, rule = nn.GRU(3, 4).double(), at.Unbiased(40)
    stream = at.SequenceStream(torch.randn(80, 2, 3).double(), torch.randn(80, 2, 4).double())
    mean = 0.0
    for context, _, chance in outcomes(rule, 5):
        mean = mean + chance * window_gradient(model, at.FixedTruncation(context), stream, 11)[1]
    _, whole = window_gradient(model, at.FixedTruncation(40), stream, 11)
    assert float((mean - whole).norm()) > 1e-4 * float(whole.norm())


def test_levels_double_from_the_losses_to_k_max():
    rule = at.Unbiased(40, share=9.0)  # so large that the first level is a coin
    assert rule.levels(10) == ((10, 0.5), (20, 0.25), (40, 0.125))
    assert at.Unbiased(8, share=9.0).levels(10) == ((8, 0.5),)
    assert at.Unbiased(35, share=9.0, fall=0.1).levels(10) == (
        (10, 0.5),
        (20, 0.05),
        (35, 0.5 * 0.1**2),
    )


def test_levels_beyond_the_context_that_always_runs():
    rule = at.Unbiased(40, share=9.0, base=at.FixedTruncation(20))
    assert rule.levels(10, 9) == ((9, 1.0), (10, 0.5), (20, 0.25), (40, 0.125))
    assert rule.levels(10, 10) == ((10, 1.0), (20, 0.5), (40, 0.25))
    assert rule.levels(10, 20) == ((20, 1.0), (40, 0.5))
    assert rule.levels(10, 40) == ((40, 1.0),)
    assert rule.expected_context(10, 20) == 20 + 0.5 * 20
    assert rule.context(rule.init(), 10, 0).k >= 20


@pytest.mark.parametrize("share", [0.05, 0.2, 0.3])
@pytest.mark.parametrize("always", [0, 7, 16, 20])
def test_random_levels_cost_their_share(share, always):
    rule = at.Unbiased(80, share=share)
    extra = rule.expected_context(10, always) - always
    assert extra == pytest.approx(share * (10 + always))


def test_a_tolerance_chooses_the_context_that_always_runs():
    torch.manual_seed(0)
    model = nn.GRU(3, 4)
    stream = at.SequenceStream(torch.randn(400, 4, 3), torch.randn(400, 4, 4))
    base = at.BiasTolerance(0.3, k_max=16, lags=16)
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, at.Unbiased(40, base=base), losses=5)
    alone = at.AdaptiveTBPTT(model, F.mse_loss, base, losses=5)
    assert tbptt.k is None
    first = next(iter(alone.windows(stream)))
    ks = {window.k for window in tbptt.windows(stream) if window.backward() is not None}
    assert tbptt.k == first.k > 0
    assert tbptt.history[0] == alone.history[0]
    assert ks == {context for context, _ in tbptt.controller.levels(5, first.k)}


def test_draws_come_as_often_as_they_should_and_depend_on_seed_and_step_alone():
    rule = at.Unbiased(40)
    state = rule.init()
    found = [rule.context(state, 10, 10 * i).k for i in range(4000)]
    for context, chance in rule.levels(10):
        assert np.mean([k >= context for k in found]) == pytest.approx(chance, abs=0.002)
    assert np.mean(found) == pytest.approx(rule.expected_context(10), rel=0.01)
    assert found == [rule.context(state, 10, 10 * i).k for i in range(4000)]
    other = at.Unbiased(40, seed=1)
    assert found != [other.context(state, 10, 10 * i).k for i in range(4000)]


@pytest.mark.parametrize("period", [2, 3, 5, 8, 21])
def test_data_that_repeat_see_every_level_as_often(period):
    for first in range(period):
        numbers = [unbiased.draw(0, window) for window in range(first, 2000, period)]
        for chance in (0.5, 0.125):
            assert np.mean(np.array(numbers) < chance) == pytest.approx(chance, abs=0.05)


def test_each_draw_is_uniform_over_seeds():
    for window in (0, 1, 7, 1000):
        numbers = np.sort([unbiased.draw(seed, window) for seed in range(1000)])
        assert np.abs(numbers - np.linspace(0, 1, 1000)).max() < 0.06  # Kolmogorov-Smirnov, 0.1 %


def test_a_window_says_how_far_it_looked_and_with_which_factors(drawn):
    drawn(0.2)  # both levels: 5 steps with probability 0.5, 10 with 0.25
    stream = at.SequenceStream(torch.randn(80, 2, 3), torch.randn(80, 2, 4))
    window, _ = window_gradient(nn.GRU(3, 4), at.Unbiased(10, share=9.0), stream, 6)
    assert (window.k, window.start, window.first, window.reach) == (10, 20, 30, (10, 14))
    assert window.factors == {30: 2.0, 25: 2.0}


def test_windows_start_where_a_state_is_held():
    """No step is run forward only to find a state."""
    steps = []

    class Counted(nn.GRU):
        def forward(self, x, state=None):
            steps.append(len(x))
            return super().forward(x, state)

    stream = at.SequenceStream(torch.randn(400, 2, 3), torch.randn(400, 2, 4))
    tbptt = at.AdaptiveTBPTT(Counted(3, 4), F.mse_loss, at.Unbiased(40), losses=5)
    tbptt.prepare(stream)
    for window in tbptt.windows(stream):
        steps.clear()
        window.backward()
        assert sum(steps) == window.stop - window.start


def test_a_run_that_goes_on_draws_as_one_that_was_not_stopped():
    def train(stop):
        torch.manual_seed(0)
        model = nn.GRU(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stream = at.SequenceStream(torch.randn(200, 2, 3), torch.randn(200, 2, 4))
        tbptt = at.AdaptiveTBPTT(model, F.mse_loss, at.Unbiased(20), losses=5)
        drawn, saved = [], None
        while len(drawn) < 60:
            for window in tbptt.windows(stream):
                window.backward()
                optimizer.step()
                optimizer.zero_grad()
                drawn.append(window.k)
                if len(drawn) == stop:
                    saved = tbptt.state_dict(), stream.state_dict()
                    break
            if saved is not None:
                tbptt = at.AdaptiveTBPTT(model, F.mse_loss, at.Unbiased(20), losses=5)
                tbptt.load_state_dict(saved[0])
                stream.load_state_dict(saved[1])
                saved = None
        return drawn[:60], [p.detach().clone() for p in model.parameters()]

    (a, left), (b, right) = train(None), train(23)
    assert a == b
    assert all(map(torch.equal, left, right))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: at.Unbiased(0), "k_max must be at least 1"),
        (lambda: at.Unbiased(10, share=0.0), "share must be positive, got 0"),
        (lambda: at.Unbiased(10, base=at.FixedTruncation(11)), "base may choose up to 11 steps"),
        (lambda: at.Unbiased(10, fall=1.5), r"fall must be in \(0, 1\], got 1.5"),
        (lambda: at.AdaptiveTBPTT(nn.GRU(3, 4), F.mse_loss, at.Unbiased(9)), "losses=35"),
        (
            lambda: at.AdaptiveTBPTT(
                nn.GRU(3, 4), F.mse_loss, at.Unbiased(9), losses=5, overlap=False
            ),
            "overlap=True",
        ),
    ],
)
def test_options_are_checked(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_a_wrapper_has_nothing_to_change():
    wrapped = at.truncate.Limited(at.Unbiased(40), 0, 10)
    with pytest.raises(TypeError, match="Limited changes the k that an estimate chose"):
        at.AdaptiveTBPTT(nn.GRU(3, 4), F.mse_loss, wrapped, losses=5)
