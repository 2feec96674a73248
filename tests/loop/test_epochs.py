"""Epochs of windows: breaking off, other streams, the schedule of estimates, wrong use."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at

from .test_windows import INPUTS, MODELS, OUT, Masked, Tagger, assert_same, data, gradients, train

pytestmark = pytest.mark.usefixtures("double")
PAPER = at.truncate.PaperGauge()


def test_a_window_that_is_skipped_is_run_through_by_the_next():
    x, y = data(12)
    model = MODELS["gru"]()
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, at.FixedTruncation(3))
    for i, window in enumerate(tbptt.windows(at.SequenceStream(x, y))):
        if i < 2:
            continue
        window.backward()
        ours = gradients(model)
        with torch.no_grad():
            _, state = model(x[: window.start], None)
        out, _ = model(x[window.start : window.stop], state)
        F.mse_loss(out[3:], y[window.first : window.stop]).backward()
        assert_same(ours, gradients(model))
    with pytest.raises(RuntimeError, match="only once"):
        window.backward()


def test_breaking_off_and_going_on_is_one_epoch():
    x, y = data(20)
    model, stream = MODELS["gru"](), at.SequenceStream(x, y)
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, at.FixedTruncation(4))
    firsts = []
    for window in tbptt.windows(stream):
        window.backward()
        firsts.append((window.start, window.first))
        if window.first == 8:
            break
    for window in tbptt.windows(stream):
        window.backward()
        firsts.append((window.start, window.first))
    assert firsts == [(0, 0), (0, 4), (4, 8), (8, 12), (12, 16)]


def test_two_loops_on_one_stream_are_refused():
    stream = at.SequenceStream(*data(40))
    one, two = (at.AdaptiveTBPTT(MODELS["gru"](), F.mse_loss, k) for k in (4, 8))

    def nested(inner):
        for window in one.windows(stream):
            window.backward()
            for other in inner.windows(stream):
                other.backward()

    def side_by_side():
        for a, b in zip(one.windows(stream), two.windows(stream), strict=True):
            a.backward()
            b.backward()

    for inner in (one, two):
        with pytest.raises(ValueError, match="another loop reads the same stream"):
            nested(inner)
        stream.rewind()
    with pytest.raises(ValueError, match="left the stream at step 4 and finds it at step 8"):
        side_by_side()


@pytest.mark.parametrize("where", ["before", "forward", "backward"])
def test_a_window_that_failed_comes_again(where):
    x, y = data(24)
    model, fails = MODELS["gru"](), []

    def loss_fn(outputs, targets):
        loss = F.mse_loss(outputs, targets)
        if fails and where == "forward":
            raise RuntimeError(fails.pop())
        if fails and where == "backward":
            loss.register_hook(lambda _: exec("raise RuntimeError(fails.pop())", {"fails": fails}))
        return loss

    plain = at.AdaptiveTBPTT(model, loss_fn, 4)
    expected = [window.backward() for window in plain.windows(at.SequenceStream(x, y))]
    tbptt, stream, losses = at.AdaptiveTBPTT(model, loss_fn, 4), at.SequenceStream(x, y), []

    def loop():
        for window in tbptt.windows(stream):
            if window.first == 8:
                fails.append("once")
                if where == "before":
                    raise RuntimeError(fails.pop())
            losses.append(window.backward())

    with pytest.raises(RuntimeError, match="once"):
        loop()
    saved = stream.state_dict(), tbptt.state_dict()
    stream, tbptt = at.SequenceStream(x, y), at.AdaptiveTBPTT(model, loss_fn, 4)
    stream.load_state_dict(saved[0])
    tbptt.load_state_dict(saved[1])
    losses += [window.backward() for window in tbptt.windows(stream)]
    assert losses == expected
    assert tbptt.trained_steps == 24


@pytest.mark.parametrize("asked", [None, 1, 2])
def test_estimates_read_few_steps_unless_asked_for_more(asked):
    x, y = data(200)
    control = at.BiasTolerance(0.3, k_max=8, lags=8)
    tbptt = at.AdaptiveTBPTT(
        MODELS["gru"](), F.mse_loss, control, losses=5, burn_in=4, estimates_per_epoch=asked
    )
    stream = at.SequenceStream(x, y)
    for _ in range(30):
        for window in tbptt.windows(stream):
            window.backward()
    assert tbptt.trained_steps == 30 * 200
    if asked is None:
        later = tbptt.probed_steps - 24 * (4 + 8 + 5)  # the first estimate reads more
        assert 0 < later <= 0.05 * tbptt.trained_steps
        assert len(tbptt.history) == 1 + 30 * 200 // 2720  # 8 windows of 17 steps, twenty times
    else:
        assert len(tbptt.history) == 30 * asked


def test_the_state_of_one_stream_is_not_carried_into_another():
    x, y = data(40)
    model = MODELS["gru"]()
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, at.FixedTruncation(4))
    one, two = at.SequenceStream(x, y), at.SequenceStream(x, y)
    windows = iter(tbptt.windows(one))
    for _ in range(3):
        next(windows).backward()
    two.cursor = 12
    with pytest.raises(ValueError, match="of another stream"):
        next(iter(tbptt.windows(two)))
    one.cursor = 4
    with pytest.raises(ValueError, match="of a later step"):
        next(iter(tbptt.windows(one)))


def test_evaluating_the_stream_in_use_leaves_it_where_it_was():
    x, y = data(40)
    model, stream = MODELS["gru"](), at.SequenceStream(x, y)
    whole = at.evaluate(model, F.mse_loss, stream)
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, at.FixedTruncation(4))
    firsts = []
    for window in tbptt.windows(stream):
        window.backward()
        firsts.append(window.first)
        assert at.evaluate(model, F.mse_loss, stream) == pytest.approx(whole)
    assert firsts == list(range(0, 40, 4))


def test_the_number_of_windows_is_rounded_up():
    x, y = data(23)
    tbptt = at.AdaptiveTBPTT(MODELS["gru"](), F.mse_loss, at.FixedTruncation(5))
    windows = tbptt.windows(at.SequenceStream(x, y))
    assert len(windows) == len(list(windows)) == 5


def test_a_saved_state_of_another_batch_size_is_refused():
    model = MODELS["gru"]()
    saved = None
    for rows in (2, 3):
        x, y = data(20, rows)
        stream = at.SequenceStream(x, y)
        tbptt = at.AdaptiveTBPTT(model, F.mse_loss, at.FixedTruncation(4))
        if saved is None:
            next(iter(tbptt.windows(stream))).backward()
            saved = tbptt.state_dict()
    tbptt.load_state_dict(saved)
    stream.cursor = 4
    with pytest.raises(ValueError, match=r"\(1, 2, 4\); CoreHead carries \(1, 3, 4\) for 3 rows"):
        next(iter(tbptt.windows(stream)))


def test_a_sum_is_not_a_mean_and_a_numpy_int_is_an_int():
    with pytest.raises(ValueError, match="reduction='sum'"):
        at.AdaptiveTBPTT(nn.GRU(2, 2), nn.MSELoss(reduction="sum"), at.FixedTruncation(2))
    with pytest.raises(ValueError, match="reduction='sum'"):
        at.evaluate(nn.GRU(2, 2), nn.MSELoss(reduction="sum"), at.SequenceStream(*data()))
    tbptt = at.AdaptiveTBPTT(nn.GRU(2, 2), F.mse_loss, at.FixedTruncation(5), losses=np.int64(2))
    assert tbptt.losses_per_window(5) == 2


def test_a_frozen_model_with_nothing_but_masked_targets():
    model = Tagger()
    model.gru.requires_grad_(False)
    stream = at.SequenceStream(torch.randn(4, 2, INPUTS), torch.full((4, 2), -100))
    (window,) = at.AdaptiveTBPTT(model, Masked(), at.FixedTruncation(4)).windows(stream)
    assert window.backward() == 0


def test_batch_first_models_train_alike():
    x, y = data(20)
    plain, swapped = nn.LSTM(INPUTS, OUT), nn.LSTM(INPUTS, OUT, batch_first=True)
    swapped.load_state_dict(plain.state_dict())
    first = at.SequenceStream(x, y)
    second = at.SequenceStream(x.transpose(0, 1), y.transpose(0, 1), batch_first=True)
    results = [
        train(model, at.AdaptiveTBPTT(model, F.mse_loss, at.FixedTruncation(4)), stream)
        for model, stream in ((plain, first), (swapped, second))
    ]
    assert_same(*results)


def test_estimates_follow_the_schedule_and_are_counted():
    x, y = torch.randn(400, 8, INPUTS), torch.randn(400, 8, 4)
    model, stream = nn.GRU(INPUTS, 4), at.SequenceStream(x, y)
    control = at.BiasTolerance(delta=0.5, k_max=30, lags=40, k_init=10, gauge=PAPER)
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, control, estimates_per_epoch=4, burn_in=5)
    assert len(tbptt.windows(stream)) == 40
    for _ in range(2):
        ks = []
        for window in tbptt.windows(stream):
            window.backward()
            ks.append(window.k)
    assert len(tbptt.history) == 7  # k_init holds for the first quarter
    assert [round(e.step / 100) for e in tbptt.history] == [1, 2, 3, 4, 5, 6, 7]
    assert tbptt.trained_steps == 800
    assert tbptt.data_steps == 800 + 7 * 45
    assert tbptt.history[-1].k == tbptt.k == ks[-1]
    at_once = at.BiasTolerance(delta=0.5, lags=40, gauge=PAPER)
    eager = at.AdaptiveTBPTT(model, F.mse_loss, at_once, burn_in=0)
    with pytest.raises(TypeError, match="not estimated yet"):
        len(eager.windows(stream))
    next(iter(eager.windows(stream)))
    assert [e.step for e in eager.history] == [0]


@pytest.mark.parametrize("gauge", [PAPER, at.truncate.MeasuredGauge()])
@pytest.mark.filterwarnings("ignore::adaptive_tbptt.TruncationWarning")
def test_a_model_that_does_not_say_where_it_starts_is_measured_after_a_burn_in(gauge):
    class Somewhere(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(INPUTS, OUT)

        def forward(self, x, state):
            return self.gru(x, torch.ones(1, x.shape[1], OUT) if state is None else state)

    stream = at.SequenceStream(*data(80))
    control = at.BiasTolerance(delta=0.5, k_max=8, lags=10, gauge=gauge)
    tbptt = at.AdaptiveTBPTT(Somewhere(), F.mse_loss, control, burn_in=2)
    for window in tbptt.windows(stream):
        window.backward()
    assert len(tbptt.history) == 1
    none = at.AdaptiveTBPTT(Somewhere(), F.mse_loss, control, burn_in=0)
    with pytest.raises(ValueError, match=r"does not start from zeros.*burn_in >= 1"):
        none.estimate(stream)


def test_a_tolerance_that_is_not_met_is_said_once():
    stream = at.SequenceStream(torch.randn(300, 4, INPUTS), torch.randn(300, 4, 4))
    control = at.BiasTolerance(delta=1e-6, k_max=3, lags=40, gauge=PAPER)
    tbptt = at.AdaptiveTBPTT(nn.GRU(INPUTS, 4), F.mse_loss, control, estimates_per_epoch=4)
    with pytest.warns(at.TruncationWarning, match="no k up to 3 meets") as caught:
        list(map(at.loop.Window.backward, tbptt.windows(stream)))
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"losses": 0}, "losses must be at least 1 step, got 0"),
        ({"losses_per_k": 0.0}, "losses_per_k must be positive"),
        ({"estimates_per_epoch": 0}, "estimates_per_epoch"),
        ({"estimate_every": 0}, "estimate_every"),
        ({"burn_in": -1}, "burn_in"),
    ],
)
def test_options_are_checked_at_once(options, says):
    with pytest.raises(ValueError, match=says):
        at.AdaptiveTBPTT(nn.GRU(2, 2), F.mse_loss, at.FixedTruncation(2), **options)


def test_losses_are_steps_and_a_multiple_of_k_has_a_name_of_its_own():
    for wrong in (1.0, 0.5, True):
        with pytest.raises(TypeError, match=r"losses is a number of steps.*pass losses_per_k="):
            at.AdaptiveTBPTT(nn.GRU(2, 2), F.mse_loss, at.FixedTruncation(2), losses=wrong)

    def losses(**options):
        return at.AdaptiveTBPTT(nn.GRU(2, 2), F.mse_loss, 7, **options).losses_per_window(7)

    assert losses() == losses(losses_per_k=1.0) == 7
    assert losses(losses_per_k=0.5) == 4
    assert losses(losses_per_k=0.01) == 1
    assert losses(losses=3) == 3


def test_the_last_window_says_how_many_losses_it_carries():
    x, y = data(23)
    tbptt = at.AdaptiveTBPTT(MODELS["gru"](), F.mse_loss, at.FixedTruncation(5), losses=10)
    found = []
    for window in tbptt.windows(at.SequenceStream(x, y)):
        window.backward()
        found.append((window.losses, window.steps, window.weight))
    assert found == [(10, 10, 20), (10, 10, 20), (3, 3, 6)]


def test_no_context_needs_a_number_of_losses():
    with pytest.raises(ValueError, match="such as losses=35"):
        at.AdaptiveTBPTT(nn.GRU(2, 2), F.mse_loss, at.FixedTruncation(0))
    with pytest.raises(ValueError, match="such as losses=35"):
        at.AdaptiveTBPTT(nn.GRU(2, 2), F.mse_loss, 0, losses_per_k=2.0)


def test_a_number_will_do():
    def controller(truncation):
        return at.AdaptiveTBPTT(nn.GRU(2, 2), F.mse_loss, truncation).controller

    assert controller(35) == controller(np.int64(35)) == at.FixedTruncation(35)
    assert (
        controller(0.1)
        == controller(np.float64(0.1))
        == at.BiasTolerance(delta=0.1, gauge=at.truncate.MeasuredGauge())
    )
    for wrong in (1.0, 0.0, 35.0, -0.1):
        with pytest.raises(ValueError, match=f"got {wrong}; a truncation length is a whole number"):
            controller(wrong)
    with pytest.raises(ValueError, match="k must not be negative"):
        controller(-3)
    for wrong in ("0.1", [], True, at.BiasTolerance):
        with pytest.raises(TypeError, match=r"a tolerance such as 0\.1, a length such as 35"):
            controller(wrong)


def test_tensors_are_not_a_stream():
    tbptt = at.AdaptiveTBPTT(nn.GRU(2, 2), F.mse_loss, at.FixedTruncation(2))
    with pytest.raises(TypeError, match="SequenceStream"):
        tbptt.windows(torch.zeros(3, 2, 2))
