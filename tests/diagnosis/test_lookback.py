"""`lookback`: how much history do the predictions need? Closed forms and brute force."""

import cmath
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

from ..oracle import DictState

ALL = 1e9  # seconds
DECAY = math.exp(-1 / 60)  # of the reservoir: time constant 60


class Leaky(nn.Module):
    """A reservoir: h_t = a h_{t-1} + x_t, the output is h_t."""

    def __init__(self, decay=DECAY):
        super().__init__()
        self.decay = decay

    def forward(self, x, state):
        state = torch.zeros_like(x[0]) if state is None else state
        powers = self.decay ** torch.arange(len(x) + 1, dtype=x.dtype).view(-1, 1, 1)
        h = powers[1:] * state + powers[:-1] * (x / powers[:-1]).cumsum(0)
        return h, h[-1]


class Recall(nn.Module):
    """Repeats what it read `delay` steps ago."""

    def __init__(self, delay=25):
        super().__init__()
        self.delay = delay

    def forward(self, x, state):
        state = x.new_zeros(self.delay, *x.shape[1:]) if state is None else state
        seen = torch.cat([state, x])
        return seen[: len(x)], seen[len(x) :]


def noise(steps=1500, rows=8, seed=0, features=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(steps, rows, features, generator=generator, dtype=torch.float64)


def lookback(model, data, loss_fn=F.mse_loss, seconds=0.0, **options):
    """Measure as few end points as allowed; `seconds=ALL` takes all. No clock decides."""
    data = (data, data) if isinstance(data, torch.Tensor) else data
    return at.lookback(model, loss_fn, data, seconds=seconds, **options)


class TestClosedForms:
    def test_a_leaky_reservoir_forgets_a_to_the_2h(self):
        found = lookback(Leaky(), noise(2000, 64), longest=400, seconds=ALL)
        for row in found.rows:
            truth = DECAY ** (2 * row.steps)
            assert row.change == pytest.approx(truth, rel=0.15)
            width = row.high - row.low
            assert row.low - width <= truth <= row.high + width
        assert abs(found.steps - 138) <= 0.2 * 138
        assert found.interval[0] <= found.steps <= found.interval[1]
        assert found.burn_in == found.steps - 1

    def test_the_full_history_begins_with_the_state_of_the_stream(self):
        x, start = noise(60, rows=70), 100 * noise(1, rows=70, seed=1)[0]
        model = Leaky(0.99)
        targets = model(x, start)[0]
        stream = at.SequenceStream(x, targets, state=start)
        found = lookback(model, stream, longest=20)
        assert found.full_loss < 1e-20
        assert found.rows[-1].loss == pytest.approx(float(targets.square().mean()), rel=0.4)

    def test_a_delayed_recall_needs_the_delay_and_the_present(self):
        x = noise(600)
        found = lookback(Recall(25), (x, x.roll(25, 0)))
        assert found.steps == 26
        assert found.interval == (26, 26)
        assert found.loss_steps == 26
        for row in found.rows:
            if row.steps < 26:
                assert row.change == pytest.approx(1.0, rel=0.02)
                assert row.loss > found.full_loss
            else:
                assert row.change == 0.0
                assert row.loss == found.full_loss

    def test_a_model_without_memory_needs_the_present_alone(self):
        found = lookback(Recall(0), noise(100))
        assert (found.steps, found.burn_in) == (1, 0)
        assert found.recommendation.startswith("1 step [1, 1] of history is enough")

    @pytest.mark.parametrize("tolerance", [0.3, 0.05, 1e-4])
    def test_the_tolerance(self, tolerance):
        found = lookback(Leaky(), noise(), longest=400, tolerance=tolerance)
        truth = math.log(tolerance) / (2 * math.log(DECAY))
        assert found.steps == pytest.approx(truth, rel=0.12)

    def test_resets_end_the_history(self):
        x, every = noise(1000), 12
        resets = torch.zeros(1000, 8, dtype=torch.bool)
        resets[::every] = True
        found = lookback(Leaky(), (x, x, resets), longest=40)
        a = DECAY**2
        phases = range(1, every + 1)  # inputs since the reset, the present one included
        variance = sum((1 - a**p) / (1 - a) for p in phases)
        for row in found.rows:
            moved = sum(
                a**row.steps * (1 - a ** (p - row.steps)) / (1 - a) for p in phases if p > row.steps
            )
            assert row.change == pytest.approx(moved / variance, rel=0.25, abs=1e-20)
        assert found.steps == 11

    def test_another_start_state(self):
        variance, start = 1 / (1 - DECAY**2), 20.0
        found = lookback(Leaky(), noise(), longest=400, start=torch.full((1, 1), start).double())
        for row in found.rows:
            truth = DECAY ** (2 * row.steps) * (1 + start**2 / variance)
            assert row.change == pytest.approx(truth, rel=0.2)
        assert found.steps > 200

    def test_the_start_state_of_a_model_that_knows_its_own(self):
        class Own(Leaky):
            def initial_state(self, rows):
                return torch.full((rows, 1), 20.0, dtype=torch.float64)

            def forward(self, x, state):
                return super().forward(
                    x, self.initial_state(x.shape[1]) if state is None else state
                )

        given = lookback(Leaky(), noise(), longest=400, start=torch.full((1, 1), 20.0).double())
        own = lookback(Own(), noise(), longest=400)
        assert own.rows[0].change == pytest.approx(given.rows[0].change, rel=0.05)


class TestNoAnswer:
    def test_an_integrator_never_has_enough(self):
        found = lookback(Leaky(1.0), noise(), longest=64)
        assert found.steps is None
        assert found.burn_in is None
        assert found.interval == (None, None)
        assert found.rows[-1].steps == 64
        assert found.rows[-1].low > 0.5
        for word in ("No history up to 64 steps is enough", "a larger longest="):
            assert word in found.recommendation

    def test_nor_in_windows(self):
        found = lookback(Leaky(1.0), [(noise(30, 200),) * 2])
        assert found.steps is None
        assert (
            "No history up to 29 steps is enough: there predictions differ from those after "
            "windows of 30 steps" in found.recommendation
        )
        assert "longer windows" in found.recommendation

    def test_an_interval_that_ends_beyond_the_longest(self):
        x = noise(1000, 2)
        last = lookback(Leaky(), x, longest=140).rows[-1]
        found = lookback(Leaky(), x, longest=140, tolerance=0.95 * last.change + 0.05 * last.high)
        assert found.steps == 140
        assert found.interval == (found.interval[0], None)
        assert f"[{found.interval[0]}, above 140] of history" in found.recommendation


def brute_force(run, x, last_target, loss_fn, lengths):
    """Change and loss of windows `(time, batch, ...)` by a plain loop over histories."""
    full = run(x)
    rows = {}
    for h in lengths:
        y = run(x[-h:])
        change = (y - full).square().sum() / (full - full.mean(0)).square().sum()
        rows[h] = float(change), float(loss_fn(y, last_target))
    return rows, float(loss_fn(full, last_target))


class Regressor(nn.Module):
    """A GRU and a readout; of every step, or of the last one alone."""

    def __init__(self, batch_first=False, last=False):
        super().__init__()
        self.gru, self.out = nn.GRU(3, 5, batch_first=batch_first), nn.Linear(5, 2)
        self.batch_first, self.last = batch_first, last
        self.double()

    def forward(self, x, state):
        y, state = self.gru(x, state)
        if self.last:
            y = y[:, -1] if self.batch_first else y[-1]
        return self.out(y), state


class TestWindows:
    @pytest.mark.parametrize("batch_first", [False, True])
    @pytest.mark.parametrize("last", [False, True])
    @pytest.mark.parametrize("loader", [False, True])
    def test_every_window_counts_as_by_brute_force(self, batch_first, last, loader):
        torch.manual_seed(1)
        model = Regressor(batch_first, last)
        x, y = noise(40, 150, features=3), noise(40, 150, 2, features=2)

        def run(part):
            part = part.transpose(0, 1) if batch_first else part
            out = model(part, None)[0]
            return out if last else (out[:, -1] if batch_first else out[-1])

        shown, targets = (x, y[-1] if last else y)
        if batch_first:
            shown, targets = x.transpose(0, 1), (y[-1] if last else y.transpose(0, 1))
        data = [(shown, targets)]
        if loader and batch_first:
            data = DataLoader(TensorDataset(shown, targets), batch_size=32, shuffle=True)
        elif loader:
            parts = zip(shown.split(64, 1), targets.split(64, 0 if last else 1), strict=True)
            data = (part for part in parts)  # can be read once only
        found = lookback(model, data, seconds=ALL)
        assert found.window == 40
        assert found.end_points == 150
        with torch.no_grad():
            lengths = [row.steps for row in found.rows]
            truth, full = brute_force(run, x, y[-1], F.mse_loss, lengths)
        assert found.full_loss == pytest.approx(full, rel=1e-12)
        for row in found.rows:
            change, loss = truth[row.steps]
            assert row.change == pytest.approx(change, rel=1e-9)
            assert row.loss == pytest.approx(loss, rel=1e-9)
            assert row.loss_low <= row.loss <= row.loss_high
        met = [row.steps for row in found.rows if row.change <= 0.01]
        assert found.steps == met[0]
        missed = [
            row.steps
            for row in found.rows
            if max(row.loss_high / full - 1, 1 - row.loss_low / full) > 0.01
        ]
        assert found.loss_steps == min(h for h in lengths if h > max(missed, default=0))

    def test_windows_of_different_lengths(self):
        """A history longer than a window is all of it."""
        short, long = noise(20, 100), noise(40, 100, seed=1)
        found = lookback(Leaky(1.0), [(short, short), (long, long)], seconds=ALL)
        with torch.no_grad():
            ends = torch.cat([short.sum(0), long.sum(0)])
            spread = (ends - ends.mean(0)).square().sum()
            for row in found.rows:
                missing = torch.cat([short[: -row.steps].sum(0), long[: -row.steps].sum(0)])
                truth = float(missing.square().sum() / spread)
                assert row.change == pytest.approx(truth, rel=1e-9)
        assert found.window == 40
        assert found.rows[-1].steps == 39

    def test_sequences_that_all_differ_in_length(self):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(20, 60, (200,), generator=generator).tolist()
        batches = [(noise(steps, 1, seed=i),) * 2 for i, steps in enumerate(lengths)]
        found = lookback(Recall(9), batches, seconds=ALL)
        assert found.end_points == 200
        assert found.steps == 10
        assert found.window == max(lengths)
        few = lookback(Recall(9), batches)
        assert few.end_points >= 64
        assert few.steps == 10

    def test_more_windows_than_needed_are_drawn_at_random(self):
        x = noise(12, 3000)
        x[:, :1500] = 0.0
        found = lookback(Leaky(), [(x, x)], seconds=ALL)
        assert found.end_points == 1024
        assert found.full_loss == pytest.approx(
            float((Leaky()(x, None)[0][-1] - x[-1]).square().mean()), rel=0.2
        )

    def test_a_list_of_two_tensors_is_a_pair(self):
        x = noise(200)
        assert lookback(Recall(3), [x, x]).window is None
        assert lookback(Recall(3), [(x, x), (x, x)]).window == 200


class TestStreams:
    def test_chunks_measure_what_a_sequence_does(self):
        x = noise(400)
        whole = lookback(Recall(9), x, longest=50)
        stream = at.ChunkStream(list(zip(x.split(30), x.split(30), strict=True)))
        found = lookback(Recall(9), stream, longest=50)
        assert stream.cursor == 0
        assert found.steps == whole.steps == 10
        assert [row.steps for row in found.rows] == [row.steps for row in whole.rows]

    def test_batch_first_models(self):
        torch.manual_seed(0)
        model = nn.GRU(3, 4).double()
        twin = nn.GRU(3, 4, batch_first=True).double()
        twin.load_state_dict(model.state_dict())
        x, y = noise(200, features=3), noise(200, seed=1, features=4)
        ours = lookback(model, (x, y))
        theirs = lookback(twin, (x.transpose(0, 1), y.transpose(0, 1)))
        for one, other in zip(ours.rows, theirs.rows, strict=True):
            assert one == pytest.approx(other, rel=1e-9)

    def test_the_same_seed_measures_the_same(self):
        one, two, other = (lookback(Leaky(0.8), noise(300), seed=s) for s in (1, 1, 2))
        assert one.rows == two.rows
        assert [row.change for row in one.rows] != [row.change for row in other.rows]

    def test_a_long_stream_is_measured_on_stretches_of_it(self):
        x = noise(20_000, 2)
        found = lookback(Recall(9), x, longest=40, seconds=ALL)
        assert found.steps == 10
        assert found.end_points == 1024

    def test_chunks_of_a_long_stream_have_a_long_full_history(self):
        """A state that never forgets changes by at least the half that the longest one misses."""
        x = noise(400, 4)
        stream = at.ChunkStream(list(zip(x.split(23), x.split(23), strict=True)))
        for data in (stream, x):
            found = lookback(Leaky(1.0), data, longest=20)
            assert found.rows[-1].change > 0.5

    def test_defaults_fit_the_data(self):
        assert lookback(Leaky(0.5), noise(100)).rows[-1].steps == 50
        assert lookback(Leaky(0.5), noise(5000, 64)).rows[-1].steps == 1024

    def test_a_state_of_two_parts_and_a_head(self):
        class Split(nn.Module):
            def __init__(self):
                super().__init__()
                self.lstm, self.out = nn.LSTM(1, 6), nn.Linear(6, 2)
                self.double()
                self.heads = []

            def core(self, x, state):
                return self.lstm(x, state)

            def head(self, features):
                self.heads.append(tuple(features.shape))
                return {"mean": self.out(features), "all": features}

        torch.manual_seed(0)
        model = Split()
        found = lookback(model, noise(300), lambda out, y: F.mse_loss(out["mean"][..., :1], y))
        assert 3 < found.steps < 40
        assert (1, 64, 6) in model.heads  # one step of all end points

    def test_separate_sequences_end_the_history_and_padding_does_not_count(self):
        lengths = [12] * 40 + [5]
        sequences = [(noise(n, 1, seed=i)[:, 0],) * 2 for i, n in enumerate(lengths)]
        stream = at.SequenceStream.from_sequences(sequences, rows=3)
        assert not stream.segment(0, len(stream)).present.all()
        seen = []

        def loss_fn(out, y):
            seen.append(out.shape)
            return F.mse_loss(out, y)

        found = lookback(Leaky(), stream, loss_fn, longest=30)
        changes = {row.steps: row.change for row in found.rows}
        assert all(change < 1e-20 for steps, change in changes.items() if steps >= 12)
        assert changes[8] > 0.01
        assert found.steps in (10, 11)
        assert any(shape[0] < 66 and shape[1] == 1 for shape in seen)  # without padded ones

    def test_a_complex_state_and_complex_outputs(self):
        class Oscillator(nn.Module):
            def forward(self, x, state):
                state = (
                    x.new_zeros(x.shape[1], 1, dtype=torch.complex128) if state is None else state
                )
                outputs = []
                for step in x:
                    state = 0.9 * cmath.exp(0.3j) * state + step
                    outputs.append(state)
                return torch.stack(outputs), state

        found = lookback(
            Oscillator(), noise(400), lambda out, y: F.mse_loss(out.real, y), longest=50
        )
        assert found.steps == pytest.approx(math.log(0.01) / math.log(0.81), rel=0.1)

    def test_outputs_without_a_time_axis_and_a_state_with_a_counter(self):
        torch.manual_seed(0)
        model, data = DictState(), (torch.randn(200, 8, 3), torch.randn(200, 8, 2))
        found = lookback(model, data, lambda out, y: F.mse_loss(out, y.flatten(0, 1)), longest=40)
        assert 1 < found.steps < 10


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
