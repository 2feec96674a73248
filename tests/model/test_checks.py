"""Models and losses that are not what they are taken for do not pass in silence."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at
from adaptive_tbptt.model.objective import default_count

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


def diagnose(model, loss_fn, stream, **options):
    sampling = at.diagnosis.Sampling(burn_in=5)
    at.diagnose(model, loss_fn, stream, losses=5, lags=8, segments=10, sampling=sampling, **options)


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


@pytest.mark.parametrize("use", [train, at.evaluate, diagnose])
def test_a_masked_loss_that_is_not_weighed_is_warned_of(use):
    x, y = data()
    y[3:, 1:] = torch.nan
    stream = at.SequenceStream(x, y)
    with pytest.warns(UserWarning, match="count_losses= must count"):
        use(nn.GRU(3, 2), masked, stream)
    use(nn.GRU(3, 2), masked, stream, count_losses=count)


@pytest.mark.parametrize(("late", "steps"), [(17, 64), (37, 5)])
def test_a_mask_that_comes_late_is_seen_by_a_check(late, steps):
    x, y = data()
    y[late:, 1:] = torch.nan  # far behind the first window
    stream = at.SequenceStream(x, y)
    (found,) = at.check(nn.GRU(3, 2), masked, stream, steps=steps)
    assert "count_losses= must count" in found.message
    assert not found.fatal
    assert at.check(nn.GRU(3, 2), masked, stream, steps=steps, count_losses=count) == []
    assert stream.cursor == 0


@pytest.mark.parametrize("use", [train, at.evaluate, diagnose])
def test_a_function_that_sums_is_refused(use):
    stream = at.SequenceStream(*data())
    with pytest.raises(ValueError, match="loss_fn returns a sum"):
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

    def losses(looks):
        torch.manual_seed(0)
        model = nn.GRU(3, 2)
        called = []

        def noisy(out, target):
            called.append(1)
            return (out + torch.randn_like(out) - target).square().mean()

        tbptt = at.AdaptiveTBPTT(model, noisy, at.FixedTruncation(5))
        if not looks:  # it is over before the random state is set
            assert list(tbptt.windows(at.SequenceStream(x, y)))
            assert called
        torch.manual_seed(1)
        called.clear()
        found = [w.backward().item() for w in tbptt.windows(at.SequenceStream(x, y))]
        assert (len(called) > len(found)) is looks
        return found

    assert losses(True) == losses(False)


def test_where_rows_start_anew_head_and_loss_are_called_once_per_window():
    x, y = data()
    resets = torch.zeros(STEPS, ROWS, dtype=torch.bool)
    resets[::3, 1] = True
    seen = []

    def normalised(out, target):
        seen.append(len(out))
        return ((out - target) / target.std()).square().mean()

    tbptt = at.AdaptiveTBPTT(nn.GRU(3, 2), normalised, at.FixedTruncation(10))
    stream = at.SequenceStream(x, y, resets)
    with pytest.warns(UserWarning, match="does not behave like a mean"):
        assert list(tbptt.windows(stream))  # it is no mean of its halves; looked at once
    seen.clear()
    for window in tbptt.windows(stream):
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


class Laid(nn.Module):
    """A recurrence whose outputs are laid out in some way."""

    def __init__(self, classes, how, batch_first=False):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.readout = nn.GRU(3, 5, batch_first=batch_first), nn.Linear(5, classes)
        self.how, self.batch_first = how, batch_first

    def forward(self, x, state):
        out, state = self.layer(x, state)
        return self.how(self.readout(out)), state


LAYOUTS = {
    "time, batch": (lambda out: out, lambda t: t, False),
    "row by row": (lambda out: out.transpose(0, 1).flatten(0, 1), lambda t: t.t(), False),
    "batch first, flat": (lambda out: out.flatten(0, 1), lambda t: t, True),
    "batch, classes, time": (lambda out: out.transpose(1, 2), lambda t: t, True),
    "with a scalar": (lambda out: {"out": out, "size": out.square().mean()}, lambda t: t, False),
}


@pytest.mark.parametrize("classes", [4, 5, 8])  # as many as half a look, a window, a look has steps
@pytest.mark.parametrize("kind", LAYOUTS)
def test_outputs_may_have_any_layout_where_rows_start_anew(kind, classes):
    x, _ = data()
    y = torch.randint(classes, (STEPS, ROWS), generator=torch.Generator().manual_seed(1))
    resets = torch.zeros(STEPS, ROWS, dtype=torch.bool)
    resets[7, 1] = resets[18, 2] = resets[22, 0] = True

    def losses(kind):
        how, order, batch_first = LAYOUTS[kind]

        def loss(out, target):
            out = out["out"] if isinstance(out, dict) else out
            if kind == "batch, classes, time":
                return F.cross_entropy(out, target)
            return F.cross_entropy(out.reshape(-1, classes), order(target).reshape(-1))

        model, stream = Laid(classes, how, batch_first), at.SequenceStream(x, y, resets)
        return [*train(model, loss, stream), at.evaluate(model, loss, stream, chunk=9)]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert losses(kind) == pytest.approx(losses("time, batch"), rel=1e-5)


class FixedRows(nn.Module):
    """Takes no other number of rows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(3, 2)

    def forward(self, x, state):
        return self.layer(x, torch.zeros(1, ROWS, 2) if state is None else state)


class RandomAlways(nn.GRU):
    """Random in evaluation too."""

    def forward(self, x, state=None):
        return super().forward(F.dropout(x, 0.3), state)


class WithMask(FixedRows):
    """Says what may be looked at, beside its outputs."""

    def forward(self, x, state):
        out, state = super().forward(x, state)
        return (out, out > 0, out[..., :0], torch.eye(len(x))[:, None].expand(-1, ROWS, -1)), state


class Halved(FixedRows):
    """Casts by itself, where nobody sees it."""

    def forward(self, x, state):
        out, state = super().forward(x, state)
        return out.bfloat16(), state


def penalised(out, target):
    loss = F.mse_loss(out, target)
    (slope,) = torch.autograd.grad(loss, out, create_graph=True)
    return loss + slope.square().mean()


@pytest.mark.parametrize(
    ("model", "loss_fn"),
    [
        (FixedRows, F.mse_loss),
        (lambda: RandomAlways(3, 2), F.mse_loss),
        (WithMask, lambda out, target: F.mse_loss(out[0], target)),
        (Halved, lambda out, target: F.mse_loss(out, target.bfloat16())),
        (lambda: nn.GRU(3, 2), penalised),
    ],
    ids=["rows", "random", "mask", "format", "gradient"],
)
def test_a_look_neither_stops_nor_suspects_what_is_in_order(model, loss_fn):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model(), loss_fn, at.SequenceStream(*data()))


def test_a_masked_mean_of_a_half_without_targets_is_no_sum():
    x, y = data()
    mask = torch.zeros(STEPS, ROWS, 1)
    mask[STEPS // 2 :] = 1.0  # the loss of both halves together is that of the second

    def loss(out, target):
        value, kept = target
        return ((out - value).square() * kept).sum() / kept.sum().clamp(min=1.0)

    with pytest.warns(UserWarning, match="count_losses= must count"):
        train(nn.GRU(3, 2), loss, at.SequenceStream(x, (y, mask)))


def test_bytes_and_other_numbers_are_not_taken_for_what_is_ignored():
    def plain_function(out, target):
        return out.mean()

    count_losses = default_count(plain_function)
    assert count_losses(torch.full((5, 4), 156, dtype=torch.uint8)) == 20  # -100 as a byte
    assert count_losses(torch.full((5, 4), -100, dtype=torch.int32)) == 20
    assert count_losses(torch.full((5, 4), -100)) == 0
    assert default_count(nn.CrossEntropyLoss())(torch.full((5, 4), 156, dtype=torch.uint8)) == 20
    assert default_count(nn.CrossEntropyLoss())(torch.full((5, 4), -100, dtype=torch.int32)) == 0


def test_class_weights_count_under_torch_compile_too():
    weight = torch.tensor([1.0, 3.0])
    compiled = torch.compile(nn.CrossEntropyLoss(weight=weight), backend="eager")
    assert default_count(compiled)(torch.tensor([[0, 1], [1, -100]])) == 7.0
