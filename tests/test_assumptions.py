"""Models and losses that are not what they are taken for do not pass in silence."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at

STEPS, ROWS = 40, 3


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS, ROWS, 5, generator=generator)
    return x[..., :3], x[..., 3:]


def train(model, loss_fn, stream, **options):
    tbptt = at.AdaptiveTBPTT(model, loss_fn, at.FixedTruncation(5), **options)
    return [window.backward().item() for window in tbptt.windows(stream)]


class Front(nn.Module):
    """Something that looks along time, then a recurrence."""

    def __init__(self, front, batch_first=False):
        super().__init__()
        self.front, self.batch_first = front, batch_first
        self.layer = nn.GRU(4, 2, batch_first=batch_first)

    def forward(self, x, state):
        if isinstance(self.front, nn.Conv1d):
            time = 1 if self.batch_first else 0
            x = self.front(x.movedim(time, -1)).movedim(-1, time)
        else:
            x = self.front(x)[0]
        return self.layer(x, state)


FRONTS = {
    "bidirectional": lambda: nn.LSTM(3, 2, bidirectional=True),
    "convolution": lambda: nn.Conv1d(3, 4, 3, padding=1),
}


def diagnose(model, loss_fn, stream):
    at.diagnose(model, loss_fn, stream, window=10, burn_in=5)


@pytest.mark.parametrize("kind", FRONTS)
@pytest.mark.parametrize("use", [train, at.evaluate, diagnose])
def test_what_looks_along_time_is_warned_of(kind, use):
    torch.manual_seed(0)
    x, y = data()
    model, stream = Front(FRONTS[kind]()), at.SequenceStream(x, y)
    with pytest.warns(UserWarning, match="outputs of Front depend on how a sequence is cut"):
        use(model, nn.MSELoss(), stream)


def test_a_convolution_of_a_batch_first_model_is_seen_too():
    x, y = data()
    model = Front(nn.Conv1d(3, 4, 3, padding=1), batch_first=True)
    with pytest.warns(UserWarning, match="depend on how a sequence is cut"):
        at.evaluate(model, nn.MSELoss(), at.SequenceStream(x, y))


def test_what_looks_at_single_steps_is_not():
    x, y = data()
    model = Front(nn.Conv1d(3, 4, 1))
    train(model, nn.MSELoss(), at.SequenceStream(x, y))


def masked(out, target):
    kept = ~target.isnan()
    return (out[kept] - target[kept]).square().mean()


def count(target):
    return float((~target.isnan()).sum())


@pytest.mark.parametrize("use", [train, at.evaluate])
def test_a_masked_loss_that_is_not_weighed_is_warned_of(use):
    x, y = data()
    y[3:, 1:] = torch.nan
    stream = at.SequenceStream(x, y)
    with pytest.warns(UserWarning, match="weigh= must count"):
        use(nn.GRU(3, 2), masked, stream)
    use(nn.GRU(3, 2), masked, stream, weigh=count)


def test_a_mask_that_comes_late_is_seen_in_time():
    x, y = data()
    y[17:, 1:] = torch.nan  # inside of the fourth window
    with pytest.warns(UserWarning, match="weigh= must count"):
        train(nn.GRU(3, 2), masked, at.SequenceStream(x, y))


@pytest.mark.parametrize("use", [train, at.evaluate])
def test_a_function_that_sums_is_refused(use):
    stream = at.SequenceStream(*data())
    with pytest.raises(ValueError, match="the loss is a sum"):
        use(nn.GRU(3, 2), lambda out, y: (out - y).square().sum(), stream)


def test_what_a_function_of_torch_ignores_does_not_count():
    torch.manual_seed(0)
    x, _ = data()
    y = torch.randint(2, (STEPS, ROWS))
    y[5:20, 1] = -100
    stream, model = at.SequenceStream(x, y), nn.GRU(3, 2)

    def loss(out, target):
        return F.cross_entropy(out.flatten(0, 1), target.flatten())

    whole = loss(model(x)[0], y).item()
    for chunk in (7, 256):
        assert at.evaluate(model, loss, stream, chunk=chunk) == pytest.approx(whole, rel=1e-5)


def test_a_random_loss_and_one_with_other_outputs_are_let_pass():
    x, y = data()

    def noisy(out, target):
        return (out - target + torch.randn_like(target)).square().mean()

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.GRU(3, 2)

        def forward(self, x, state):
            out, state = self.layer(x, state)
            return (out, out.square().mean()), state

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(nn.GRU(3, 2), noisy, at.SequenceStream(x, y))
        train(Pair(), lambda out, t: F.mse_loss(out[0], t) + out[1], at.SequenceStream(x, y))


def test_looking_does_not_change_what_is_drawn():
    x, y = data()

    def losses(seen):
        torch.manual_seed(0)
        model = nn.GRU(3, 2)

        def noisy(out, target):
            return (out + torch.randn_like(out) - target).square().mean()

        tbptt = at.AdaptiveTBPTT(model, noisy, at.FixedTruncation(5))
        tbptt.recurrent.losses_seen, tbptt.recurrent.cuts_checked = seen, bool(seen)
        return [w.backward().item() for w in tbptt.windows(at.SequenceStream(x, y))]

    assert losses(0) == losses(2**20)


def test_where_rows_start_anew_head_and_loss_are_called_once_per_window():
    x, y = data()
    resets = torch.zeros(STEPS, ROWS, dtype=torch.bool)
    resets[::3, 1] = True
    seen = []

    def normalised(out, target):
        seen.append(len(out))
        return ((out - target) / target.std()).square().mean()

    tbptt = at.AdaptiveTBPTT(nn.GRU(3, 2), normalised, at.FixedTruncation(10))
    tbptt.recurrent.losses_seen = 2**20  # looked at enough: it is no mean of its halves
    for window in tbptt.windows(at.SequenceStream(x, y, resets)):
        window.backward()
    assert seen == [10, 10, 10, 10]


def test_a_model_that_cannot_be_called_is_told_how_it_is():
    class One(nn.Module):
        def forward(self, x):
            return x, x

    class NotNone(nn.Module):
        def forward(self, x, state):
            return x, state + 1

    for model in (One(), NotNone()):
        with pytest.raises(TypeError, match=r"could not be called as \(inputs, state\)"):
            train(model, nn.MSELoss(), at.SequenceStream(*data()))
