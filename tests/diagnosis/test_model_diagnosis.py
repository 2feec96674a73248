"""`diagnose`: how biased is a loop, and what would more context cost?"""

import json
import math
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at
from adaptive_tbptt.diagnosis import Diagnosis, Row, two_stages
from adaptive_tbptt.diagnosis.recommendation import recommend
from adaptive_tbptt.estimate import LevelCurve

ROWS = 8
FEW = {"losses": 5, "lags": 16, "segments": 12}


def data(steps=200, rows=ROWS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(steps, rows, 3, generator=generator)
    return x, torch.cumsum(x, 0)[..., :1].tanh().expand(-1, -1, 6).contiguous()


def diagnose(model=None, loss_fn=F.mse_loss, stream=None, **options):
    burn_in = options.pop("burn_in", 8)
    sampling = at.diagnosis.Sampling(burn_in=burn_in, **options.pop("sampling", {}))
    model = nn.GRU(3, 6) if model is None else model
    stream = data() if stream is None else stream
    return at.diagnose(model, loss_fn, stream, sampling=sampling, **{**FEW, **options})


class TestRows:
    def test_fields_and_the_first_row_is_the_loop_as_it_is(self):
        found = diagnose()
        assert found.rows[0]._fields[:6] == ("losses", "context", "bias", "low", "high", "cost")
        assert [row.context for row in found.rows] == [0, 1, 2, 4, 8]  # 16 is the reference
        assert {row.losses for row in found.rows} == {5}
        assert found.rows[0].cost == 1.0
        assert all(row.low <= row.bias <= row.high for row in found.rows)
        assert all(row.bound is None for row in found.rows)
        costs = [row.cost for row in found.rows]
        assert costs == sorted(costs)
        assert found.curve.samples == 12 * 5 * ROWS
        assert found.seconds > 0

    @pytest.mark.parametrize("losses", [1, 6])
    def test_the_bias_is_that_of_brute_force(self, losses):
        """The gradients of every window that could be drawn, by plain autograd."""
        torch.manual_seed(3)
        model, (x, y), lags, burn_in = nn.GRU(3, 6), data(70, 16), 8, 6
        parameters = list(model.parameters())
        totals = dict.fromkeys([0, 1, 2, 4, lags], 0.0)
        for first in range(burn_in + lags, 70 - losses + 1):
            for k in totals:
                with torch.no_grad():
                    _, state = model(x[first - lags - burn_in : first - k])
                out, _ = model(x[first - k : first + losses], state)
                loss = F.mse_loss(out[k:], y[first : first + losses])
                gradient = torch.autograd.grad(loss, parameters)
                totals[k] = totals[k] + torch.cat([g.flatten() for g in gradient])
        whole = totals[lags]
        found = diagnose(
            model, stream=(x, y), losses=losses, lags=lags, segments=120, burn_in=burn_in
        )
        for row in found.rows:
            truth = float((whole - totals[row.context]).norm() / whole.norm())
            width = row.high - row.low
            assert row.low - width / 2 <= truth <= row.high + width / 2
            assert row.bias == pytest.approx(truth, rel=0.2)

    def test_the_papers_bound_is_a_column_to_be_asked_for(self):
        model, stream = nn.GRU(3, 6), data()
        found = diagnose(model, stream=stream, bound=True)
        bounds = [row.bound for row in found.rows]
        assert all(isinstance(bound, float) and bound > 0 for bound in bounds)
        assert bounds == sorted(bounds, reverse=True)
        assert "paper's bound" in str(found)
        assert f"{bounds[0]:.3g}" in str(found)
        plain = diagnose(model, stream=stream)
        assert [row[:5] for row in plain.rows] == [row[:5] for row in found.rows]
        assert "paper's bound" not in str(plain)

    def test_the_same_seed_measures_the_same(self):
        model, stream = nn.GRU(3, 6), data()
        one, two, other = (
            diagnose(model, stream=stream, sampling={"seed": seed}) for seed in (1, 1, 2)
        )
        assert [r[:5] for r in one.rows] == [r[:5] for r in two.rows] != [r[:5] for r in other.rows]

    def test_a_single_loss_is_the_papers_k(self):
        found = diagnose(losses=1, segments=40)
        assert found.recommendation.startswith("A single loss truncated at its own step misses")

    def test_levels_end_where_the_data_do(self):
        found = diagnose(stream=data(60), lags=None)
        assert found.curve.lags == 60 - 8 - 5
        assert found.curve.contexts == (0, 1, 2, 4, 8, 16, 32, 47)

    def test_batch_first_models_and_chunks(self):
        torch.manual_seed(0)
        model = nn.GRU(3, 6)
        twin = nn.GRU(3, 6, batch_first=True)
        twin.load_state_dict(model.state_dict())
        x, y = data()
        ours = diagnose(model, stream=(x, y))
        theirs = diagnose(twin, stream=(x.transpose(0, 1), y.transpose(0, 1)))
        biases = [[row.bias for row in found.rows] for found in (ours, theirs)]
        assert biases[0] == pytest.approx(biases[1], rel=1e-4)
        chunks = list(zip(x.split(20), y.split(20), strict=True))
        stream = at.ChunkStream(chunks)
        found = diagnose(model, stream=stream)
        assert [row.context for row in found.rows] == [0, 1, 2, 4, 8]
        assert stream.cursor == 0

    def test_the_mode_is_the_models_own_unless_asked(self, monkeypatch):
        monkeypatch.setattr("adaptive_tbptt.diagnosis.model_diagnosis.look", lambda *_: None)

        class Dropped(nn.Module):
            def __init__(self):
                super().__init__()
                self.gru, self.drop, self.modes = nn.GRU(3, 6), nn.Dropout(0.5), set()

            def forward(self, x, state):
                if torch.is_grad_enabled() and len(x) > 1:  # one step finds the layout
                    self.modes.add(self.training)
                return self.gru(self.drop(x), state)

        for options, modes in (({}, {True}), ({"train": False}, {False})):
            model = Dropped().train()
            diagnose(model, sampling=options)
            assert model.modes == modes
            assert model.training

    def test_dropout_differs_from_window_to_window(self, monkeypatch):
        """Two windows with one mask would not be independent."""
        seeds = []
        seed = torch.manual_seed
        monkeypatch.setattr(torch, "manual_seed", lambda s: (seeds.append(s), seed(s))[1])
        diagnose(segments=12)
        assert len(seeds) == len(set(seeds)) == 12


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
    model, stream = Busy(), at.SequenceStream(*data())
    model.drop.eval()
    stream.cursor = 7
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    calls = []

    def loss(out, target):
        calls.append(1)
        if fails and len(calls) > 40:
            raise ZeroDivisionError
        return F.mse_loss(out, target)

    random = torch.get_rng_state()
    if fails:
        with pytest.raises(ZeroDivisionError):
            diagnose(model, loss, stream, segments=200)
    else:
        diagnose(model, loss, stream)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert not model.drop.training
    assert stream.cursor == 7
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all((p.grad == 3.0).all() for p in model.parameters())


class TestBudget:
    def test_segments_are_as_many_as_asked_for(self):
        for segments in (6, 8, 9, 50):
            assert diagnose(segments=segments).curve.samples == segments * 5 * ROWS

    def test_little_time_still_tells_a_gradient_from_noise(self):
        found = diagnose(segments=None, seconds=0.0)
        assert found.curve.samples == 12 * 5 * ROWS  # twice what it takes to tell at all

    def test_time_is_not_spent_where_the_answer_is_precise(self):
        constant = torch.ones(200, 2, 3), torch.zeros(200, 2, 6)
        found = diagnose(stream=constant, segments=None, seconds=30.0)
        assert found.curve.samples == 4 * two_stages.PILOT * 5 * 2
        assert found.seconds < 20

    def test_a_pilot_that_noise_hides_spends_what_the_budget_allows(self, monkeypatch):
        ticks = iter(range(10**6))
        slow = SimpleNamespace(**{**vars(time), "monotonic": lambda: 0.01 * next(ticks)})
        monkeypatch.setattr(two_stages, "time", slow)
        monkeypatch.setattr(two_stages, "PILOT", 6)
        noise = torch.zeros(200, 2, 3), torch.randn(200, 2, 6)
        sampling = {"level": 0.999}  # six windows cannot tell anything at this level
        found = diagnose(stream=noise, segments=None, seconds=4.0, lags=4, sampling=sampling)
        assert found.curve.samples > 32 * 6 * 5 * 2

    def test_too_few_segments_are_refused(self):
        with pytest.raises(ValueError, match=r"at least 6 segments .* at level 0\.9, got 5"):
            diagnose(segments=5)
        with pytest.raises(ValueError, match="at least 9 segments"):
            diagnose(segments=8, sampling={"level": 0.99})

    def test_progress_is_shown_on_a_terminal_after_two_seconds(self, monkeypatch, capsys):
        clock = iter(range(10_000))
        slow = SimpleNamespace(**{**vars(time), "monotonic": lambda: float(next(clock))})
        monkeypatch.setattr(two_stages, "time", slow)
        monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
        diagnose(show=True)
        told = capsys.readouterr().err
        assert "measuring: window 12 of 12" in told
        assert told.endswith("\r")
        diagnose(show=False)
        assert capsys.readouterr().err == ""


def error_to_signal(out, target):
    """As audio models use it: over the window as a whole, no mean over its steps."""
    return (out - target).square().sum() / target.square().sum()


class TestBadInput:
    def test_more_lags_than_the_data_hold(self):
        with pytest.raises(ValueError, match=r"lags must be in \[1, 187\] for rows of 200 steps"):
            diagnose(lags=188)
        with pytest.raises(ValueError, match="got 0"):
            diagnose(lags=0)
        with pytest.raises(ValueError, match="rows of 12 steps are too short for a burn-in of 8"):
            diagnose(stream=data(12), lags=None)

    def test_losses_and_delta(self):
        with pytest.raises(ValueError, match="losses must be at least 1 step, got 0"):
            diagnose(losses=0)
        with pytest.raises(ValueError, match=r"delta must be in \(0, 1\), got 10: 0\.1 tolerates"):
            diagnose(delta=10)

    @pytest.mark.parametrize("where", ["inputs", "targets"])
    def test_nan_in_one_segment_is_named(self, where):
        x, y = data(400 if where == "inputs" else 120)
        (x if where == "inputs" else y)[-100 if where == "inputs" else 70, 2] = torch.nan
        stream = at.SequenceStream(x, y)
        generator = torch.Generator().manual_seed(0)
        parts = (stream.random_segment(8 + 16 + 5, generator) for _ in range(400))
        used = 29 if where == "inputs" else 5
        first = next(
            i for i, part in enumerate(parts) if getattr(part, where)[-used:].isnan().any()
        )
        assert first >= two_stages.PILOT  # a later stage counts on
        with pytest.raises(ValueError, match=rf"of segment {first}\b.* NaN or infinite"):
            diagnose(stream=stream, segments=400)

    def test_no_state_gradient_at_all(self):
        class Cut(nn.Module):
            def __init__(self):
                super().__init__()
                self.gru = nn.GRU(3, 6)

            def forward(self, x, state):
                return self.gru(x, None if state is None else state.detach())

        with (
            pytest.warns(UserWarning, match="no gradient reaches the state that is passed to Cut"),
            pytest.raises(ValueError, match=r"no gradient reaches the state.*any of 8 segments"),
        ):
            diagnose(Cut())

    def test_parameters_without_a_gradient_are_noted(self):
        class Part(nn.Module):
            def __init__(self):
                super().__init__()
                self.gru = nn.GRU(3, 6)
                self.unused = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(6))
                self.fine = nn.Parameter(torch.zeros(()))

            def forward(self, x, state):
                out, state = self.gru(x, state)
                return out + self.fine, state

        names = ", ".join(f"unused.{i}.weight" for i in range(5)) + ", ..."
        assert f"no gradient reaches these parameters: {names}" in diagnose(Part()).notes
        assert not any("no gradient" in note for note in diagnose().notes)

    def test_a_loss_that_is_no_mean_is_refused_for_single_losses(self):
        x, y = data()
        stream = x, y * torch.rand(200, ROWS, 1)
        with pytest.raises(ValueError, match="not what you train with: pass losses="):
            diagnose(loss_fn=error_to_signal, stream=stream, losses=1)
        with pytest.raises(ValueError, match="not what you train with: pass losses="):
            at.check_bias(nn.GRU(3, 6), error_to_signal, stream, 4, lags=16)
        found = diagnose(loss_fn=error_to_signal, stream=stream, losses=5)
        assert not found.curve.hidden

    def test_a_whole_chunk_loss_is_evaluated_once_on_the_losses_of_a_window(self):
        x, y = data()
        shapes = set()

        def noted(out, target):
            if out.requires_grad:
                shapes.add(tuple(out.shape))
            return error_to_signal(out, target)

        diagnose(loss_fn=noted, stream=(x, y * torch.rand(200, ROWS, 1)), losses=7)
        assert shapes == {(7, ROWS, 6)}

    def test_a_sum_is_refused(self):
        with pytest.raises(ValueError, match="loss_fn returns a sum"):
            diagnose(loss_fn=lambda out, target: (out - target).square().sum())

    def test_what_is_no_stream(self):
        with pytest.raises(TypeError, match=r"expected a stream or a pair \(inputs, targets\)"):
            diagnose(stream=torch.zeros(3, 2, 2))

    def test_masked_windows(self):
        class Flat(nn.CrossEntropyLoss):
            def forward(self, out, target):
                return super().forward(out.flatten(0, 1), target.flatten())

        x, _ = data()
        y = torch.randint(6, (200, ROWS))
        y[torch.rand(200, ROWS) < 0.9] = -100
        found = diagnose(loss_fn=Flat(), stream=(x, y), segments=40)
        assert 40 <= found.curve.samples < 0.2 * 40 * 5 * ROWS


def curve(contexts=(0, 8, 64, 128), **options):
    levels = len(contexts)
    found = {
        "contexts": contexts, "estimate": np.zeros(levels), "low": np.zeros(levels),
        "high": np.zeros(levels), "single": np.zeros(levels), "tail": 0.0, "beta": 0.9,
        "gradient_norm": 1.0, "chance": 0.0, "losses": 35, "samples": 2800, "level": 0.9,
    }  # fmt: skip
    return LevelCurve(**{**found, **options})


def rows(*values, losses=35):
    """Rows from (context, bias, low, high, cost)."""
    return tuple(Row(losses, *value) for value in values)


class TestRecommendation:
    def test_no_context_is_needed(self):
        found = recommend(rows((0, 0.04, 0.03, 0.05, 1.0), (8, 0.01, 0.0, 0.02, 1.2)), curve(), 0.1)
        assert found == (
            "Your loop with 35 steps misses 4% [3%, 5%] of the gradient: it needs no context."
        )

    def test_some_context_halves_it_and_more_meets_delta(self):
        found = recommend(
            rows(
                (0, 0.24, 0.23, 0.26, 1.0), (8, 0.2, 0.18, 0.22, 1.2),
                (64, 0.12, 0.11, 0.13, 1.6), (128, 0.04, 0.03, 0.05, 2.3),
            ), curve(), 0.1,
        )  # fmt: skip
        assert found == (
            "Your loop with 35 steps misses 24% [23%, 26%] of the gradient; 64 steps of context "
            "would bring that to 12% at 1.6 times the cost, 128 to 4% at 2.3 times."
        )

    def test_the_first_that_halves_it_meets_delta_at_once(self):
        found = recommend(rows((0, 0.24, 0.2, 0.3, 1.0), (8, 0.05, 0.04, 0.06, 1.2)), curve(), 0.1)
        assert found == (
            "Your loop with 35 steps misses 24% [20%, 30%] of the gradient; 8 steps of context "
            "would bring that to 5% at 1.2 times the cost."
        )

    def test_nothing_is_shown_to_meet_delta(self):
        found = recommend(rows((0, 0.9, 0.8, 1.0, 1.0), (8, 0.7, 0.6, 0.8, 1.2)), curve(), 0.1)
        assert found == (
            "Your loop with 35 steps misses 90% [80%, 100%] of the gradient. No context up to 8 is "
            "shown to bring that below 10%: at 8 it is 70% [60%, 80%] at 1.2 times the cost."
        )

    def test_it_is_left_open(self):
        found = recommend(rows((0, 0.4, 0.2, 0.6, 1.0), (8, 0.1, 0.0, 0.3, 1.2)), curve(), 0.1)
        assert found == (
            "Your loop with 35 steps misses 40% [20%, 60%] of the gradient; 8 steps of context "
            "would bring that to 10% at 1.2 times the cost. 2800 losses leave open which context "
            "brings it below 10%."
        )

    def test_a_bias_that_rises_again_is_not_met_before(self):
        found = recommend(
            rows(
                (0, 0.4, 0.38, 0.42, 1.0), (8, 0.05, 0.04, 0.06, 1.2),
                (16, 0.3, 0.28, 0.32, 1.3), (32, 0.02, 0.01, 0.03, 1.5),
            ), curve(), 0.1,
        )  # fmt: skip
        assert "32 to 2% at 1.5 times" in found

    def test_noise(self):
        hidden = curve(high=np.full(4, np.inf))
        found = recommend(rows((0, math.nan, 0.0, math.inf, 1.0)), hidden, 0.1)
        assert found == (
            "Noise hides the gradient of 2800 losses: give more rows, more data or more seconds"
        )

    def test_single_losses(self):
        found = recommend(rows((0, 0.04, 0.03, 0.05, 1.0), losses=1), curve(), 0.1)
        assert found.startswith("A single loss truncated at its own step misses 4%")

    def test_one_step_is_a_step(self):
        found = recommend(rows((0, 0.24, 0.2, 0.3, 1.0), (1, 0.05, 0.04, 0.06, 1.2)), curve(), 0.1)
        assert "; 1 step of context would" in found

    def test_it_meets_the_delta_that_was_asked_for(self):
        strict, loose = (diagnose(delta=delta) for delta in (0.001, 0.9))
        assert "it needs no context" in loose.recommendation
        assert "it needs no context" not in strict.recommendation


class TestReport:
    def test_it_prints_a_row_per_context_and_the_recommendation(self):
        found = diagnose()
        lines = str(found).splitlines()
        assert lines[0] == (
            "windows of 5 losses; share of the gradient that is missed, against 16 steps of context"
        )
        assert lines[1].split() == ["context", "misses", "90%", "interval", "cost"]
        first = found.rows[0]
        assert lines[2].split()[:2] == ["0", f"{first.bias:.1%}"]
        assert lines[2].endswith("1.00 x  your loop as it is")
        assert [line.split()[0] for line in lines[2:7]] == ["0", "1", "2", "4", "8"]
        assert found.recommendation in lines
        assert all(f"note: {note}" in lines for note in found.notes)
        assert "the 90% intervals cover the choice of windows: 480 losses in 12 groups" in (
            found.notes
        )

    def test_the_dict_is_json(self):
        found = diagnose(bound=True)
        kept = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert [row["context"] for row in kept["rows"]] == [0, 1, 2, 4, 8]
        assert kept["rows"][0]["bias"] == found.rows[0].bias
        assert kept["recommendation"] == found.recommendation
        assert (kept["losses"], kept["lags"], kept["samples"], kept["level"]) == (5, 16, 480, 0.9)

    def hidden(self):
        """Targets without a relation to anything: the mean gradient is zero."""
        torch.manual_seed(0)
        noise = torch.randn(200, 2, 3), torch.randn(200, 2, 6)
        return diagnose(loss_fn=lambda out, y: (out * y).mean(), stream=noise, segments=8)

    def test_noise_is_an_outcome(self):
        found = self.hidden()
        assert found.curve.hidden
        assert "not resolved" in str(found)
        assert found.recommendation.startswith("Noise hides the gradient")
        kept = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert kept["rows"][0]["bias"] is None
        assert kept["tail"] is None
        assert not any("inf" in note for note in found.notes)
        found.figure()

    def test_what_lies_beyond_is_noted(self):
        class Leak(nn.Module):
            def __init__(self, decay):
                super().__init__()
                self.w, self.decay = nn.Parameter(torch.ones(())), decay

            def forward(self, x, state):
                h = torch.zeros_like(x[0]) if state is None else state
                out = []
                for step in x:
                    h = self.decay * h + self.w * step
                    out.append(h)
                return torch.stack(out), h

        constant = torch.ones(200, 2, 1), torch.zeros(200, 2, 1)

        def notes(decay, **options):
            loss = lambda out, y: out.mean() + 0 * y.mean()  # noqa: E731
            found = diagnose(Leak(decay), loss, constant, **options)
            return " ".join(found.notes), found

        text, found = notes(0.95)
        assert found.curve.tail > 0.1
        assert f"beyond 16 steps, extrapolation finds another {found.curve.tail:.1%}" in text
        assert "has not decayed within 16 steps" in notes(1.0)[0]
        fast, _ = notes(0.5)
        assert "beyond" not in fast
        assert "decayed" not in fast
        assert "inf" not in notes(0.5, lags=1)[0]

    def test_the_figure_shows_bias_against_context_and_cost(self, tmp_path):
        found = diagnose()
        path = tmp_path / "deep" / "bias.png"
        figure = found.figure(path)
        assert path.stat().st_size > 10_000
        left, right = figure.axes
        for axes, values in ((left, "context"), (right, "cost")):
            (bars,) = axes.containers
            np.testing.assert_allclose(
                bars[0].get_xdata().astype(float), [getattr(row, values) for row in found.rows]
            )
            np.testing.assert_allclose(bars[0].get_ydata(), [100 * row.bias for row in found.rows])
        segments = left.containers[0][2][0].get_segments()
        np.testing.assert_allclose(
            [s[:, 1] for s in segments], [(100 * r.low, 100 * r.high) for r in found.rows]
        )
        assert "context" in left.get_xlabel()
        assert "cost" in right.get_xlabel()
        assert any(text.get_text() == "your loop" for text in right.texts)

    def test_it_is_a_value(self):
        found = diagnose()
        assert isinstance(found, Diagnosis)
        with pytest.raises(AttributeError):
            found.rows = ()


def test_nothing_is_warned_of_where_all_is_well():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        diagnose()
