"""`lookback` in use: what is compared, what stays undisturbed, time, errors, the report."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import adaptive_tbptt as at
from adaptive_tbptt.diagnosis import Lookback, history_search
from adaptive_tbptt.estimate.history_curve import HistoryCurve

from .lookback_cases import ALL, DECAY, Leaky, Recall, lookback, noise


class TestPredictions:
    def test_a_shift_of_all_logits_is_no_change_after_softmax(self):
        class Shifted(Leaky):
            def forward(self, x, state):
                h, state = super().forward(x, state)
                return torch.cat([h + x, h - x], -1), state

        x, y = noise(400), torch.zeros(400, 8, dtype=torch.long)

        def loss_fn(logits, targets):
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

        raw = lookback(Shifted(), (x, y), loss_fn, longest=100)
        assert raw.steps is None
        probable = lookback(
            Shifted(), (x, y), loss_fn, longest=100, predict=lambda logits: logits.softmax(-1)
        )
        assert probable.steps == 1
        assert [row.loss for row in raw.rows] == pytest.approx(
            [row.loss for row in raw.rows[:1]] * len(raw.rows)
        )

    def test_of_several_tensors_the_worst_counts(self):
        class Two(Leaky):
            def forward(self, x, state):
                h, state = super().forward(x, state)
                return {"large": 1e3 * x, "small": 1e-3 * h, "classes": x.argmax(-1)}, state

        def loss_fn(out, y):
            return F.mse_loss(out["large"], y)

        found = lookback(Two(), noise(), loss_fn, longest=400)
        alone = lookback(Two(), noise(), loss_fn, longest=400, predict=lambda out: out["small"])
        assert found.rows == alone.rows
        assert abs(found.steps - 138) < 28
        assert found.part == found.to_dict()["part"] == "small"
        assert "about 'small', which changes most" in found.recommendation
        assert alone.part is None
        assert "changes most" not in alone.recommendation
        short = lookback(Two(), noise(), loss_fn, longest=8)
        assert short.steps is None
        assert "about 'small'" in short.recommendation

    def test_constant_predictions_need_no_history(self):
        class Constant(Leaky):
            def forward(self, x, state):
                h, state = super().forward(x, state)
                return torch.full_like(h, 3.0), state

        found = lookback(Constant(), noise(100))
        assert found.steps == 1
        assert all(row.change == 0 for row in found.rows)

    def test_steps_without_a_loss_do_not_count(self):
        class Flagged(Leaky):
            """Needs a long history where the flag is set, none elsewhere."""

            def forward(self, x, state):
                h, state = super().forward(x, state)
                return torch.where(x[..., 1:] > 0, h[..., :1], x[..., :1]), state

        x = noise(600, features=2)
        y = torch.where(x[..., 1:] > 0, torch.nan, x[..., :1])

        def loss_fn(out, y):
            return (out - y).square().nanmean()

        def count(y):
            return float((~y.isnan()).sum())

        found = lookback(Flagged(), (x, y), loss_fn, count_losses=count, longest=50)
        assert found.steps == 1
        assert found.full_loss == 0.0
        assert lookback(Flagged(), (x, x[..., :1]), longest=50).steps is None

    def test_end_points_are_looked_for_where_losses_are_rare(self):
        x = noise(390, 1)
        y = torch.full_like(x, torch.nan)
        y[10::50] = 0.0
        found = lookback(
            Recall(4),
            (x, y),
            lambda out, y: (out - y).square().nanmean(),
            count_losses=lambda y: float((~y.isnan()).sum()),
            longest=100,
        )
        assert found.end_points == 11 * 6  # steps 110, 160, ..., 360; 64 or more for the pilot
        assert found.steps == 5
        with pytest.raises(ValueError, match="nearly every target is masked"):
            lookback(Recall(4), x, count_losses=lambda y: 0.0)

    def test_a_whole_chunk_loss_sees_the_end_points_of_a_group_at_once(self):
        shapes = set()

        def error_to_signal(out, y):
            shapes.add(tuple(out.shape))
            return (out - y).square().sum() / y.square().sum()

        with pytest.warns(UserWarning, match="does not behave like a mean"):
            found = lookback(Leaky(0.5), noise(200, 8, seed=1), error_to_signal)
        assert (1, 64, 1) in shapes
        assert found.full_loss == pytest.approx(1 / 3, rel=0.2)  # a^2 / (1 - a^2)


class Busy(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.drop = nn.GRU(3, 6), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, state):
        self.calls += 1
        return self.gru(self.drop(x), state)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_the_callers_is_disturbed(fails):
    model = Busy()
    model.drop.eval()
    stream = at.SequenceStream(torch.randn(200, 8, 3), torch.randn(200, 8, 6))
    stream.cursor = 7
    before = {name: t.clone() for name, t in model.state_dict().items()}
    graphs = []

    def loss(out, target):
        graphs.append(out.requires_grad)
        if fails and len(graphs) > 40:
            raise ZeroDivisionError
        return F.mse_loss(out, target)

    random = torch.get_rng_state()
    if fails:
        with pytest.raises(ZeroDivisionError):
            lookback(model, stream, loss)
    else:
        lookback(model, stream, loss)
    assert not any(graphs)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert not model.drop.training
    assert stream.cursor == 7
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_a_loader_that_shuffles_leaves_the_random_state():
    x, model = torch.randn(100, 20, 3), nn.GRU(3, 3, batch_first=True)
    loader = DataLoader(TensorDataset(x, x), batch_size=10, shuffle=True)
    random = torch.get_rng_state()
    lookback(model, loader)
    assert torch.equal(torch.get_rng_state(), random)


def test_dropout_is_off_whatever_the_mode():
    torch.manual_seed(0)
    model, data = Busy(), (torch.randn(200, 8, 3), torch.randn(200, 8, 6))
    training, evaluating = lookback(model.train(), data), lookback(model.eval(), data)
    assert training.rows == evaluating.rows


class TestBudget:
    def test_little_time_still_gives_an_interval(self):
        found = lookback(Leaky(0.8), noise(300))
        assert found.end_points == history_search.FEWEST * 64
        assert 0 < found.rows[0].low < found.rows[0].high < math.inf

    def test_much_time_is_not_spent(self):
        found = lookback(Leaky(0.8), noise(300), seconds=ALL)
        assert found.end_points == history_search.MOST * 64

    @pytest.mark.parametrize("loss", [False, True])
    def test_histories_are_close_together_only_near_an_answer(self, loss):
        powers = tuple(2**i for i in range(10))
        change, flat = DECAY ** (2 * np.array(powers)), np.zeros(10)
        near, far = (flat, 1 + change) if loss else (change, 1 + flat)
        curve = HistoryCurve(powers, near, near, near, far, far, far, 1.0, 64, 0.9)
        found = history_search.Search(512, 0.01, 0.9).near_answer(curve)
        assert set(powers) <= set(found)
        fine = [h for h in found if 64 <= h <= 256]  # 128 is within a factor of two
        assert set(found) - set(powers) == set(fine) - set(powers)
        assert max(b / a for a, b in pairwise(fine)) < 1.08  # two octaves in 24 steps
        beyond = history_search.Search(512, 1e-9, 0.9).near_answer(curve)
        assert beyond == powers


class TestBadInput:
    def test_options(self):
        with pytest.raises(ValueError, match=r"tolerance must be in \(0, 1\), got 1: 0\.01 toler"):
            lookback(Leaky(), noise(100), tolerance=1)
        with pytest.raises(ValueError, match=r"level must be in \(0, 1\), got 90"):
            lookback(Leaky(), noise(100), level=90)
        for longest in (0, 100):
            with pytest.raises(ValueError, match=rf"longest must be in \[1, 99\] .*got {longest}"):
                lookback(Leaky(), noise(100), longest=longest)
        with pytest.raises(TypeError, match=r"whole number of steps, got 2\.5"):
            lookback(Leaky(), noise(100), longest=2.5)
        with pytest.raises(ValueError, match=r"longest must be in \[1, 29\] for rows of 30 steps"):
            lookback(Leaky(), [(noise(30, 64),) * 2], longest=30)

    def test_too_little_data(self):
        with pytest.raises(ValueError, match="rows of 1 step have no history"):
            lookback(Leaky(), noise(1))
        with pytest.raises(ValueError, match="a window of 1 step has no history"):
            lookback(Leaky(), [(noise(1, 40),) * 2])
        with pytest.raises(ValueError, match="at least 8 windows, got 7"):
            lookback(Leaky(), [(noise(30, 7),) * 2])

    def test_data_of_another_kind(self):
        x = noise(30, 64)
        with pytest.raises(TypeError, match=r"expected a stream or a pair \(inputs, targets\)"):
            lookback(Leaky(), 3)
        with pytest.raises(TypeError, match=r"every batch .* \(inputs, targets\).*got dict"):
            lookback(Leaky(), [{"x": x}])
        with pytest.raises(ValueError, match=r"targets of shape \(3, 2\) fit neither .*\(30, 64\)"):
            lookback(Leaky(), [(x, torch.zeros(3, 2))])

    def test_what_is_not_finite(self):
        x = noise(200)
        x[:, 3] = torch.nan
        with pytest.raises(ValueError, match="the inputs are NaN or infinite at step"):
            lookback(Leaky(), (x, torch.zeros_like(x)))

        class Overflows(Leaky):
            def forward(self, x, state):
                h, state = super().forward(x, state)
                return h / (h != h), state

        with pytest.raises(ValueError, match="predictions after the full history are NaN"):
            lookback(Overflows(), noise(200))

    def test_start_states(self):
        with pytest.raises(
            ValueError, match=r"state leaf 'state' has shape \(8, 1\); Leaky carries \(1, 1\)"
        ):
            lookback(Leaky(), noise(100), start=torch.zeros(8, 1))

    def test_predictions_that_cannot_be_compared(self):
        with pytest.raises(
            TypeError, match=r"tensors \(1, 64, \.\.\.\), got .*\(1, 64\).*predict="
        ):
            lookback(Leaky(), noise(100), predict=lambda out: out.argmax(-1))


class TestReport:
    def test_a_loss_that_needs_a_longer_history_is_mentioned(self):
        x = noise(1500, 32)
        precise = lookback(Leaky(), (x, 1.01 * Leaky()(x, None)[0]), longest=700)
        assert precise.loss_steps > 1.5 * precise.steps
        assert f"For a loss within 1% of that take {precise.loss_steps} steps." in str(precise)
        near = [row.steps for row in precise.rows if 0.9 < row.steps / precise.loss_steps < 1.1]
        assert len(near) > 3
        exact = lookback(Leaky(), (x, Leaky()(x, None)[0]), longest=400)
        assert exact.loss_steps is None
        assert "No history up to 400 steps gives a loss within 1% of that." in str(exact)
        noisy = lookback(Leaky(), (x, 100 * x), longest=400)
        assert noisy.loss_steps < noisy.steps
        assert "a loss within" not in str(noisy)

    def test_the_table_shows_powers_of_two_and_the_answer(self):
        found = lookback(Recall(25), noise(400))
        lines = str(found).splitlines()
        shown = [line.split()[0] for line in lines[2:-2]]
        assert shown == ["1", "2", "4", "8", "16", "26", "32", "64", "128", "200"]
        assert next(line for line in lines if line.split()[0] == "26").endswith("enough")
        assert lines[-1] == found.recommendation
        assert "26 steps [26, 26] of history are enough" in lines[-1]
        assert "discard the first 25 predictions" in lines[-1]
        assert "cold start" not in lookback(Recall(5), [(noise(20, 64),) * 2]).recommendation

    def test_it_becomes_json(self):
        found = lookback(Recall(25), noise(400))
        again = json.loads(json.dumps(found.to_dict()))
        assert (again["steps"], again["burn_in"], again["interval"]) == (26, 25, [26, 26])
        assert again["rows"][0]["change"] == found.rows[0].change
        assert again["recommendation"] == found.recommendation

    def test_the_figure_shows_change_and_loss_against_history(self, tmp_path):
        found = lookback(Leaky(0.8), noise(300))
        figure = found.figure(tmp_path / "sub" / "lookback.png")
        assert (tmp_path / "sub" / "lookback.png").stat().st_size > 1000
        left, right = figure.axes
        steps = [row.steps for row in found.rows]
        for axes, answer, values in (
            (left, found.steps, [100 * row.change for row in found.rows]),
            (right, found.loss_steps, [row.loss for row in found.rows]),
        ):
            x, y = axes.lines[0].get_data()
            assert list(x) == steps
            assert list(y) == pytest.approx(values)
            assert answer in [line.get_xdata()[0] for line in axes.lines[1:]]
        assert lookback(Leaky(1.0), noise(100), longest=8).figure() is not None

    def test_it_is_a_frozen_value(self):
        found = lookback(Recall(2), noise(60))
        assert isinstance(found, Lookback)
        with pytest.raises(AttributeError):
            found.steps = 3
