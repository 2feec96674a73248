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


def evaluate_in_chunks(model, loss_fn, stream, **options):
    return at.evaluate(model, loss_fn, stream, chunk=9, **options)


def train_on_single_steps(model, loss_fn, stream, **options):
    rule = at.BiasTolerance(0.5, k_max=5, lags=9, gauge=at.truncate.PaperGauge())
    tbptt = at.AdaptiveTBPTT(model, loss_fn, rule, losses=10, burn_in=3, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", at.TruncationWarning)
        return [window.backward() for window in tbptt.windows(stream)]


def train_as_the_paper(model, loss_fn, stream, **options):
    tbptt = at.AdaptiveTBPTT(model, loss_fn, at.BiasTolerance(0.5, k_max=5, lags=9), **options)
    tbptt.prepare(stream)


@pytest.mark.parametrize("use", [evaluate_in_chunks, train_on_single_steps, train_as_the_paper])
def test_a_masked_loss_that_is_not_weighed_is_warned_of_where_a_mean_is_needed(use):
    x, y = data()
    y[3:8, 1:] = torch.nan
    stream = at.SequenceStream(x, y)
    with pytest.warns(UserWarning, match="count_losses= must count"):
        use(nn.GRU(3, 2), masked, stream)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(nn.GRU(3, 2), masked, stream, count_losses=count)


@pytest.mark.parametrize("use", [train, at.evaluate, diagnose])
def test_windows_and_single_chunks_need_no_mean(use):
    stream = at.SequenceStream(*data())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(nn.GRU(3, 2), lambda out, y: ((out - y) / y.std()).square().mean(), stream)


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
    assert list(tbptt.windows(stream))  # looked at once
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

    (found,) = at.check(nn.GRU(3, 2), loss, (x, (y, mask)))
    assert "count_losses= must count" in found.message
    assert not found.fatal


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


class Parts(nn.Module):
    """Parts named core and head; `forward` may do more than call them."""

    def __init__(self, more=None, batch_first=False):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.GRU(3, 4, batch_first=batch_first)
        self.readout, self.more, self.batch_first = nn.Linear(4, 2), more, batch_first

    def core(self, x, state):
        return self.layer(x, state)

    def head(self, features):
        return self.readout(features)

    def forward(self, x, state):
        features, state = self.core(x, state)
        if self.more == "between":
            features = torch.relu(features)
        out = self.head(features)
        if self.more == "after":
            out = 3 * out
        if self.more == "shape":
            out = out[..., :1]
        return out, state


class NoForward(Parts):
    forward = nn.Module.forward


class OtherForward(Parts):
    def forward(self, x):
        raise AssertionError("nobody asked for it")


@pytest.mark.parametrize("more", ["between", "after", "shape"])
@pytest.mark.parametrize("use", [train, at.evaluate, diagnose])
def test_a_forward_that_does_more_than_core_and_head_is_refused(use, more):
    stream = at.SequenceStream(*data())
    with pytest.raises(ValueError, match=r"Parts has .* so its forward is never called.*names"):
        use(Parts(more), nn.MSELoss(), stream)
    (found,) = at.check(Parts(more), nn.MSELoss(), stream)
    assert found.fatal
    assert "give the two methods other names" in str(found)


@pytest.mark.parametrize("make", [Parts, NoForward, OtherForward])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("use", [train, at.evaluate, diagnose])
def test_a_forward_that_is_head_of_core_or_never_called_passes(use, make, batch_first):
    stream = at.SequenceStream(*data())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(make(batch_first=batch_first), nn.MSELoss(), stream)


@pytest.mark.parametrize("cast", [False, True])
def test_a_forward_is_compared_up_to_rounding(cast):
    model, (x, y) = Parts(), data()
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        assert at.check(model, nn.MSELoss(), (x, y)) == []


@pytest.mark.parametrize(
    ("steps", "rows", "batch_first", "suspicious"),
    [
        (16, 500, False, True),
        (16, 64, False, True),
        (16, 63, False, False),
        (500, 16, False, False),
        (16, 17, True, True),  # a model that says batch_first makes it likelier
        (16, 16, True, False),
        (500, 16, True, False),
    ],
)
@pytest.mark.parametrize("use", [train, diagnose])
def test_data_that_may_be_batch_first_are_warned_of(steps, rows, batch_first, suspicious, use):
    model = nn.GRU(3, 2, batch_first=batch_first)
    steps = steps if use is train else max(steps, 18)
    stream = at.SequenceStream(torch.randn(steps, rows, 3), torch.randn(steps, rows, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use(model, nn.MSELoss(), stream)
    if use is diagnose and (steps, rows) in ((18, 64), (18, 17)):
        suspicious = False  # two steps more are less suspicious
    texts = [str(w.message) for w in caught]
    expected = f"the stream has {steps} steps of {rows} rows. Its first dimension is time"
    assert [expected in text for text in texts] == [True] * suspicious
    assert all("batch_first=True to SequenceStream" in text for text in texts)


def test_data_laid_out_as_the_model_takes_them_are_not_suspected():
    """Steps and rows are counted after the stream has put time first."""
    model = nn.GRU(3, 2, batch_first=True)
    x, y = torch.randn(16, 500, 3), torch.randn(16, 500, 2)
    assert at.check(model, nn.MSELoss(), (x, y)) == []
    assert at.check(model, nn.MSELoss(), at.SequenceStream(x, y, batch_first=True)) == []


def shifted(out, target):
    """Predicts the step after each one, as many language models do: n steps have n - 1 losses."""
    return F.mse_loss(out[:-1], target[1:])


@pytest.mark.parametrize("use", [train, at.evaluate, diagnose])
def test_labels_that_are_shifted_inside_are_warned_of(use):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use(nn.GRU(3, 2), shifted, at.SequenceStream(*data()))
    texts = [str(w.message) for w in caught]
    assert sum("every window loses one loss" in text for text in texts) == 1
    assert any("shift the targets in the stream instead" in text for text in texts)


def test_a_last_step_that_is_masked_or_like_the_first_is_not_suspected():
    x, y = data()
    y[-1] = torch.nan
    assert at.check(nn.GRU(3, 2), masked, (x, y), count_losses=count) == []
    x[:] = 1.0
    assert at.check(nn.GRU(3, 2), nn.MSELoss(), (x, torch.ones(STEPS, ROWS, 2))) == []


def test_a_check_says_everything_at_once():
    class Wrong(nn.Module):
        """Looks one step back along time, and its parts are not all of it."""

        def __init__(self):
            super().__init__()
            self.layer = nn.GRU(3, 2)

        def core(self, x, state):
            return self.layer(x + torch.cat([torch.zeros_like(x[:1]), x[:-1]]), state)

        def head(self, features):
            return features

        def forward(self, x, state):
            features, state = self.core(x, state)
            return 2 * features, state

    x, y = torch.randn(20, 100, 3), torch.randn(20, 100, 2)

    def total(out, target):
        return shifted(out, target) * len(out)

    stream = at.SequenceStream(x, y)
    found = at.check(Wrong(), total, stream)
    for says in (
        "the stream has 20 steps of 100 rows",
        "its forward is never called",
        "depend on how a sequence is cut",
        "does not behave like a mean",
        "does not depend on the inputs of a window's last step",
    ):
        assert sum(says in str(one) for one in found) == 1, says
    assert [one.fatal for one in found].count(True) == 1
    assert stream.cursor == 0


def test_a_check_says_what_it_could_not_check():
    def needs_many(out, target):
        if len(out) < 30:
            raise ZeroDivisionError("too short")
        return F.mse_loss(out, target)

    found = at.check(nn.GRU(3, 2), needs_many, data())
    assert "loss_is_no_mean was not checked: too short" in [str(one) for one in found]
    assert all("was not checked" in str(one) and not one.fatal for one in found)
    with warnings.catch_warnings():  # while training it is the training pass that speaks
        warnings.simplefilter("error")
        at.evaluate(nn.GRU(3, 2), needs_many, at.SequenceStream(*data()))


def test_a_check_takes_chunks_and_leaves_everything_as_it_was():
    x, y = data()
    stream = at.ChunkStream(list(zip(x.split(10), y.split(10), strict=True)))
    model = nn.GRU(3, 2)
    random = torch.get_rng_state()
    assert at.check(model, nn.MSELoss(), stream, steps=8) == []
    assert torch.equal(torch.get_rng_state(), random)
    assert stream.cursor == 0
    assert model.training
    assert torch.equal(stream.read(40).inputs, x)


def test_one_look_at_the_first_windows_of_a_loop_and_no_more():
    x, y = data()
    called = []

    def noted(out, target):
        called.append(len(out))
        return F.mse_loss(out, target)

    tbptt = at.AdaptiveTBPTT(nn.GRU(3, 2), noted, at.FixedTruncation(5))
    stream = at.SequenceStream(x, y)
    for _ in range(2):
        for window in tbptt.windows(stream):
            window.backward()
    looks = [n for n in called if n != 5]
    assert looks == called[: len(looks)]  # all of them before the first window
    assert 0 < len(looks) < 10
    resumed = at.AdaptiveTBPTT(nn.GRU(3, 2), noted, at.FixedTruncation(5))
    resumed.load_state_dict(tbptt.state_dict())
    called.clear()
    for window in resumed.windows(stream):
        window.backward()
    assert set(called) == {5}


def test_padding_that_a_function_ignores_is_said_where_a_window_has_nothing_else():
    x, _ = data()
    y = torch.randint(1, 4, (STEPS, ROWS))
    y[20:] = 0  # padding

    def loss(out, target):
        return F.cross_entropy(out.flatten(0, 1), target.flatten(), ignore_index=0)

    stream = at.SequenceStream(x, y)
    tbptt = at.AdaptiveTBPTT(nn.GRU(3, 4), loss, at.FixedTruncation(5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = [window.backward().item() for window in tbptt.windows(stream)]
    texts = [str(w.message) for w in caught]
    assert sum("is NaN. If loss_fn ignores all of their targets" in text for text in texts) == 1
    assert any("the loss of steps 20 to 25 is NaN" in text for text in texts)
    assert values[-1] != values[-1]
    counted = at.AdaptiveTBPTT(
        nn.GRU(3, 4), loss, at.FixedTruncation(5), count_losses=lambda t: float((t != 0).sum())
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = [window.backward().item() for window in counted.windows(stream)]
    assert values[4:] == [0.0] * 4
