"""`lookback`: how much history do the predictions need? Closed forms and brute force."""

import cmath
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import adaptive_tbptt as at

from ..oracle import DictState
from .lookback_cases import ALL, DECAY, Leaky, Recall, Regressor, brute_force, lookback, noise


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
