"""K from the bias itself, measured by level while training: what is asked, kept and resumed."""

import io
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at
from adaptive_tbptt.estimate import LevelSums, Outcome
from adaptive_tbptt.truncate import MeasuredGauge, ProbeBudget

pytestmark = pytest.mark.filterwarnings("ignore::adaptive_tbptt.TruncationWarning")
CONTEXTS = (0, 1, 2, 4, 8)


def learns_to_remember(steps=400, rows=16, seed=4):
    torch.manual_seed(seed)
    x = torch.randn(steps, rows, 2)
    targets = torch.cumsum(x, 0)[..., :1].tanh().expand(-1, -1, 6)
    return nn.GRU(2, 6), at.SequenceStream(x, targets)


def rule(delta=0.3, budget=(4, 8, 6), **options):
    gauge = MeasuredGauge(budget=ProbeBudget(*budget))
    return at.BiasTolerance(delta, **{"k_max": 24, "lags": 30, "gauge": gauge, **options})


def made_up(groups=8, contexts=CONTEXTS, losses=1, size=16, mean=1.0, seed=0):
    noise = np.random.default_rng(seed).standard_normal((groups, len(contexts), size))
    vectors = 0.5 ** np.arange(len(contexts))[:, None] * (mean + 0.3 * noise)
    return LevelSums(contexts, vectors.astype(np.float32), np.full(groups, 4.0), losses)


class TestRequest:
    @pytest.mark.parametrize(
        ("options", "losses"),
        [({}, 1), ({"losses": 5}, 5), ({"losses": 1}, 1), ({"losses_per_k": 2.0}, 1)],
    )
    def test_it_measures_the_windows_one_trains_with(self, options, losses):
        model, stream = learns_to_remember()
        tbptt = at.AdaptiveTBPTT(model, F.mse_loss, rule(k_init=4), burn_in=5, **options)
        assert tbptt.request.losses == losses
        evidence = tbptt.estimate(stream)
        assert evidence.losses == tbptt.truncation.evidence.losses == losses
        windows = 8 if "losses" in options else 32  # single losses say less than windows do
        assert evidence.groups == 8
        assert evidence.samples == windows * 16 * losses
        assert tbptt.probed_steps == windows * (5 + 30 + losses)

    def test_levels_are_powers_of_two_and_the_limits_of_k(self):
        asked = rule(k_min=3, k_max=24, lags=30).request(rule().init(), None)
        assert asked.contexts == (0, 1, 2, 3, 4, 8, 16, 24, 30)
        beyond = rule(k_max=50, lags=30).request(rule().init(), None)
        assert beyond.contexts[-2:] == (32, 50)

    def test_the_first_estimate_draws_more(self):
        control, asked = rule().init(), []
        for seed in range(3):
            request = rule().request(control, 1)
            asked.append(request.segments)
            control = rule().update(control, made_up(request.segments, request.contexts, seed=seed))
        assert asked == [8, 4, 4]

    @pytest.mark.parametrize("budget", [(0, 8, 6), (4, 0, 6), (4, 8, -1)])
    def test_a_budget_must_buy_something(self, budget):
        with pytest.raises(ValueError, match="budget"):
            MeasuredGauge(budget=ProbeBudget(*budget))

    @pytest.mark.parametrize("options", [{"level": 1.0}, {"level": 0.0}, {"size": 15}])
    def test_options_are_checked_at_construction(self, options):
        with pytest.raises(ValueError, match="got"):
            MeasuredGauge(**options)


class TestEvidence:
    def test_it_adds_up_and_is_bounded(self):
        control, gauge_rule, groups, samples = rule().init(), rule(), [], []
        for seed in range(6):
            request = gauge_rule.request(control, 1)
            newest = made_up(request.segments, request.contexts, seed=seed)
            control = gauge_rule.update(control, newest)
            groups.append(control.evidence.groups)
            samples.append(control.curve.samples)
            np.testing.assert_array_equal(
                control.evidence.vectors[-request.segments :], newest.vectors
            )
        assert groups == [8, 10, 10, 10, 10, 10]  # 6 of the earlier ones, 4 new ones
        assert samples == [4 * g for g in groups]

    def test_nothing_is_remembered_where_nothing_should_be(self):
        gauge = MeasuredGauge(budget=ProbeBudget(4, 8, 0))
        first, second = made_up(8, seed=0), made_up(4, seed=1)
        np.testing.assert_array_equal(gauge.gather(first, second).vectors, second.vectors)

    @pytest.mark.parametrize("other", [{"contexts": (0, 1, 2, 4, 9)}, {"losses": 2}, {"size": 32}])
    def test_other_levels_losses_or_sizes_are_not_mixed(self, other):
        gauge = MeasuredGauge()
        newest = made_up(4, **other)
        assert gauge.gather(made_up(8), newest) is newest

    def test_a_log_keeps_the_bias_of_all_evidence(self):
        controller = rule()
        control, newest = controller.init(), None
        for seed in range(3):
            request = controller.request(control, 1)
            newest = made_up(request.segments, request.contexts, seed=seed)
            control = controller.update(control, newest)
        kept = controller.brief(control, newest)
        assert kept == {"levels": control.curve.brief()}
        assert kept != {"levels": controller.gauge.bias(newest).brief()}

    def test_what_is_said_of_a_changed_k_rests_on_all_evidence(self):
        inner = rule(0.1, k_max=9, lags=10, k_init=5)
        wrapped = at.truncate.Bucketed(at.truncate.RateLimited(inner), (8, 9))
        control = wrapped.init()
        for seed in range(4):
            request = wrapped.request(control, None)
            noise = made_up(request.groups, request.contexts, mean=0.0, seed=seed)
            control = wrapped.update(control, noise)
        assert control.k == 8
        assert f"noise hides the gradient of {4 * 10} losses" in control.decision.message
        assert control.decision.outcome is Outcome.UNRESOLVED
        assert control.inner.inner.evidence.groups == 10

    def test_noise_keeps_k_until_evidence_has_added_up(self):
        controller = rule(0.1, budget=(2, 4, 100), k_init=16, k_max=24, lags=30)
        control, outcomes = controller.init(), []
        for seed in range(20):
            request = controller.request(control, 1)
            rng = np.random.default_rng(seed)
            mean = 0.2 ** np.arange(len(request.contexts))[:, None]
            noise = 3.0 * mean * rng.standard_normal((request.segments, len(mean), 16))
            vectors = (mean + noise).astype(np.float32)
            counts = np.full(request.segments, 4.0)
            control = controller.update(control, LevelSums(request.contexts, vectors, counts, 1))
            outcomes.append(control.decision.outcome)
            if not control.decision.outcome.met:
                assert control.k <= 16
        assert outcomes[0] is Outcome.UNRESOLVED
        assert outcomes[-1].met
        assert control.k in (1, 2, 4)

    def test_a_gauge_says_which_evidence_it_reads(self):
        profile = at.probe(nn.RNN(2, 3), F.mse_loss, torch.randn(20, 2, 2), torch.zeros(20, 2, 3))
        with pytest.raises(TypeError, match="reads gradients by level; got a lag profile"):
            MeasuredGauge().bias(profile)
        for gauge in (at.truncate.PaperGauge(), at.truncate.ReleaseGauge()):
            with pytest.raises(TypeError, match=r"reads a lag profile.*got gradients by level"):
                gauge.bias(made_up())


class TestTraining:
    def test_k_is_a_level_and_meets_the_tolerance(self):
        """The promise itself: ask for delta, train, measure again on other segments."""
        model, stream = learns_to_remember(400, 32)
        controller = rule(0.2, budget=(8, 24, 24), k_max=16, lags=20)
        tbptt = at.AdaptiveTBPTT(
            model, F.mse_loss, controller, losses=8, estimates_per_epoch=3, burn_in=10
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for window in tbptt.windows(stream):
            window.backward()
            optimizer.step()
            optimizer.zero_grad()
        levels = set(tbptt.request.contexts)
        assert len(tbptt.history) == 3
        assert {e.k for e in tbptt.history} <= levels
        tbptt.estimate(stream)
        decision = tbptt.truncation.decision
        assert decision.outcome.met
        (check,) = at.check_bias(
            model, F.mse_loss, stream, tbptt.k, losses=8, lags=20, segments=48, seed=7
        )
        assert check.verdict(0.2) == "kept"
        low, high = tbptt.truncation.curve.interval_at(tbptt.k)
        assert low <= check.high
        assert check.low <= high

    def test_no_context_may_be_enough(self):
        model, stream = learns_to_remember()
        controller = rule(0.9, k_min=0, budget=(8, 16, 0))
        tbptt = at.AdaptiveTBPTT(model, F.mse_loss, controller, losses=20, burn_in=10)
        windows = list(tbptt.windows(stream))
        assert (tbptt.k, tbptt.truncation.decision.outcome) == (0, Outcome.MET_AT_MINIMUM)
        assert [w.first - w.start for w in windows] == [0] * 20

    def resumable(self, wrap):
        model, stream = learns_to_remember(120, 4)
        controller = wrap(rule(0.3, k_init=4, k_max=12, lags=16))
        tbptt = at.AdaptiveTBPTT(
            model, F.mse_loss, controller, estimates_per_epoch=5, burn_in=4, losses=6
        )
        return model, stream, tbptt, torch.optim.SGD(model.parameters(), lr=0.1)

    @pytest.mark.parametrize("wrap", [lambda c: c, at.truncate.Bucketed])
    @pytest.mark.parametrize("stop", [3, 9, 14])
    def test_resumed_equals_uninterrupted(self, wrap, stop):
        def train(parts, stop_after=None):
            _, stream, tbptt, optimizer = parts
            for i, window in enumerate(tbptt.windows(stream)):
                window.backward()
                optimizer.step()
                optimizer.zero_grad()
                if i == stop_after:
                    return

        whole = self.resumable(wrap)
        train(whole)
        first = self.resumable(wrap)
        train(first, stop)
        file = io.BytesIO()
        model, stream, tbptt, _ = first
        torch.save([model.state_dict(), stream.state_dict(), tbptt.state_dict()], file)
        file.seek(0)
        second = self.resumable(wrap)
        for part, saved in zip(second[:3], torch.load(file, weights_only=True), strict=True):
            part.load_state_dict(saved)
        assert second[2].k == tbptt.k
        train(second)
        assert str(second[2].history) == str(whole[2].history)  # there may be NaN
        assert len(whole[2].history) == 4
        assert second[2].probed_steps == whole[2].probed_steps
        for a, b in zip(second[0].parameters(), whole[0].parameters(), strict=True):
            assert torch.equal(a, b)

    def test_what_is_saved_comes_back_and_is_of_tensors_and_plain_values(self):
        model, stream = learns_to_remember()
        tbptt = at.AdaptiveTBPTT(model, F.mse_loss, rule(), burn_in=5)
        tbptt.estimate(stream)
        again = at.AdaptiveTBPTT(model, F.mse_loss, rule(), burn_in=5)
        again.load_state_dict(tbptt.state_dict())
        ours, theirs = again.truncation.evidence, tbptt.truncation.evidence
        np.testing.assert_array_equal(ours.vectors, theirs.vectors)
        np.testing.assert_array_equal(ours.counts, theirs.counts)
        assert (ours.contexts, ours.losses) == (theirs.contexts, theirs.losses)
        assert str(again.truncation) == str(tbptt.truncation)
        again.estimate(stream)
        tbptt.estimate(stream)
        assert str(again.history) == str(tbptt.history)

    def test_evidence_of_before_levels_is_left_behind(self):
        saved = at.truncate.TruncationState(7).to_dict()
        for old in ([], [{"norms": 1}]):
            state = at.truncate.TruncationState.from_dict({**saved, "evidence": old})
            assert (state.k, state.evidence) == (7, None)
        del saved["evidence"]
        assert at.truncate.TruncationState.from_dict(saved).evidence is None

    def test_the_random_state_of_training_is_not_touched(self):
        class Dropped(nn.Module):
            def __init__(self):
                super().__init__()
                self.gru, self.drop = nn.GRU(2, 6), nn.Dropout(0.5)

            def forward(self, x, state):
                return self.gru(self.drop(x), state)

        _, stream = learns_to_remember()
        tbptt = at.AdaptiveTBPTT(Dropped(), F.mse_loss, rule(), burn_in=5)
        before = torch.get_rng_state()
        tbptt.estimate(stream)
        assert torch.equal(torch.get_rng_state(), before)
        assert all(p.grad is None for p in tbptt.parameters)

    def test_an_unresolved_estimate_is_said_once_and_k_stays(self):
        torch.manual_seed(0)
        x = torch.randn(200, 1, 2)
        stream = at.SequenceStream(x, torch.randn(200, 1, 6))
        controller = rule(0.1, budget=(2, 2, 0), k_init=7)
        tbptt = at.AdaptiveTBPTT(nn.GRU(2, 6), F.mse_loss, controller, burn_in=5)
        with pytest.warns(at.TruncationWarning, match="noise hides the gradient"):
            tbptt.estimate(stream)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tbptt.estimate(stream)
            tbptt.estimate(stream)
        assert [e.k for e in tbptt.history] == [7, 7, 7]
        assert all(math.isnan(e.relative_bias) for e in tbptt.history)
