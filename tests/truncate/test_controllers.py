"""One conformance suite that every controller passes, and what each wrapper is for."""

import io
import itertools
import json
import math
from functools import partial

import numpy as np
import pytest
import torch

import adaptive_tbptt as at

PAPER = at.truncate.PaperGauge()
tolerate = partial(at.BiasTolerance, gauge=PAPER)
TOLERANCE = tolerate(delta=0.2, k_min=2, k_max=50, lags=60, k_init=7)
MEASURED = at.BiasTolerance(
    delta=0.2, k_min=2, k_max=50, lags=60, k_init=7, gauge=at.truncate.MeasuredGauge()
)
CONTROLLERS = {
    "fixed": at.FixedTruncation(12),
    "tolerance": TOLERANCE,
    "release": at.BiasTolerance(delta=0.2, lags=60, gauge=at.truncate.ReleaseGauge()),
    "no k_init": tolerate(delta=0.2, lags=60),
    "measured": MEASURED,
    "measured rate": at.truncate.RateLimited(MEASURED, factor=1.5),
    "measured powers": at.truncate.Bucketed(at.truncate.Limited(MEASURED, low=3, high=40)),
    "guess": at.truncate.BestGuess(k_max=60),
    "guess rate": at.truncate.RateLimited(
        at.truncate.BestGuess(k_max=60), factor=math.inf, fall=1.5
    ),
    "guess limited": at.truncate.Limited(at.truncate.BestGuess(k_max=60), low=0, high=9),
    "guess, unbiased": at.Unbiased(100, base=at.truncate.BestGuess(k_max=60)),
    "detached": at.FixedTruncation(0),
    "unbiased": at.Unbiased(40),
    "measured, unbiased": at.Unbiased(100, base=MEASURED),
    "limited": at.truncate.Limited(TOLERANCE, low=5, high=9),
    "buckets": at.truncate.Bucketed(TOLERANCE, (4, 16, 64)),
    "powers": at.truncate.Bucketed(TOLERANCE),
    "rate": at.truncate.RateLimited(TOLERANCE, factor=1.5),
    "all": at.truncate.Bucketed(
        at.truncate.RateLimited(at.truncate.Limited(TOLERANCE, low=3, high=40))
    ),
}
NEVER_MEASURE = {"fixed", "detached", "unbiased"}


def profile(beta, seed=0, samples=16, lags=60):
    rng = np.random.default_rng(seed)
    norms = beta ** np.arange(lags + 1)[:, None] * rng.lognormal(0, 0.2, (lags + 1, samples))
    return at.estimate.LagProfile(norms, {"h": norms}, np.cumsum(norms[:, :4], axis=0))


def sums(request, beta, seed=0):
    """What a level request might measure where lag k adds beta^k."""
    rng = np.random.default_rng(seed)
    edges = itertools.pairwise([-1, *request.contexts])
    mean = np.array([sum(beta**k for k in range(a + 1, b + 1)) for a, b in edges])[:, None]
    groups = request.groups or request.segments
    noise = rng.standard_normal((groups, len(mean), 16))
    vectors = mean * (1 + 0.3 * noise)
    counts = np.full(groups, 4.0 * request.losses)
    return at.estimate.LevelSums(
        request.contexts, vectors.astype(np.float32), counts, request.losses
    )


def measure(controller, control, beta, seed):
    """What a controller asks for; a fixed one is shown something it did not ask for."""
    request = controller.request(control, None)
    if isinstance(request, at.measure.LevelRequest):
        return sums(request, beta, seed)
    return profile(beta, seed)


def run(controller, betas, control=None):
    control = controller.init() if control is None else control
    for i, beta in enumerate(betas):
        control = controller.update(control, measure(controller, control, beta, i))
        yield control


BETAS = [0.5, 0.9, 0.99, 1.05, 0.3, 0.8]


@pytest.mark.parametrize("name", CONTROLLERS)
class TestConformance:
    def test_k_is_an_int_up_to_k_max(self, name):
        controller = CONTROLLERS[name]
        for control in run(controller, BETAS):
            assert type(control.k) is int
            lowest = 0 if name in ("detached", "unbiased") or "guess" in name else 1
            assert lowest <= control.k <= controller.k_max

    def test_the_same_profiles_give_the_same_ks(self, name):
        ks = [[c.k for c in run(CONTROLLERS[name], BETAS)] for _ in range(2)]
        assert ks[0] == ks[1]

    def test_it_goes_on_exactly_from_a_saved_control(self, name):
        controller = CONTROLLERS[name]
        *_, third = run(controller, BETAS[:3])
        file = io.BytesIO()
        torch.save(third.to_dict(), file)
        file.seek(0)
        restored = at.truncate.TruncationState.from_dict(torch.load(file, weights_only=True))
        assert restored == third
        ours = [c.k for c in run(controller, BETAS[3:], restored)]
        assert ours == [c.k for c in run(controller, BETAS[3:], third)]

    def test_it_is_a_value(self, name):
        controller = CONTROLLERS[name]
        before = repr(controller)
        list(run(controller, BETAS))
        assert repr(controller) == before
        with pytest.raises(AttributeError):
            controller.k_max = 3

    def test_it_says_what_it_wants_measured(self, name):
        controller = CONTROLLERS[name]
        request = controller.request(controller.init(), 4)
        if name in NEVER_MEASURE:
            assert request is None
        else:
            assert request.lags == 60
        start = controller.init().k
        assert start is None or start <= controller.k_max

    def test_what_a_log_keeps_is_json(self, name):
        controller = CONTROLLERS[name]
        (control,) = run(controller, [0.8])
        evidence = measure(controller, controller.init(), 0.8, 0)
        kept = json.loads(json.dumps(controller.brief(control, evidence), allow_nan=False))
        expected = {"levels"} if "measured" in name or "guess" in name else {"decay"}
        assert set(kept) - {"random"} == (set() if name in NEVER_MEASURE else expected)


def test_bias_tolerance_is_the_pure_functions_put_together():
    measured = profile(0.8)
    (control,) = run(TOLERANCE, [0.8])
    bias = at.bias_bound(measured.mean, at.fit_decay(measured.mean))
    assert control.decision == at.choose_truncation(bias, delta=0.2, k_min=2, k_max=50)
    assert control.k == control.decision.k


def test_fixed_never_asks_and_never_moves():
    controller = at.FixedTruncation(12)
    assert [c.k for c in run(controller, BETAS)] == [12] * len(BETAS)


def test_limits_clip():
    assert {c.k for c in run(CONTROLLERS["limited"], [0.3, 0.99])} == {5, 9}


def test_what_is_reported_is_the_bound_at_the_k_in_use():
    measured = profile(0.9)
    bias = at.bias_bound(measured.mean, at.fit_decay(measured.mean))
    limited = at.truncate.Limited(TOLERANCE, low=1, high=3)
    control = limited.update(limited.init(), measured)
    assert control.k == 3
    assert control.decision.relative_bias == pytest.approx(bias.relative[3])
    assert not control.decision.outcome.met
    wide = at.truncate.Bucketed(TOLERANCE, (40,))
    control = wide.update(wide.init(), measured)
    assert control.decision.relative_bias == pytest.approx(bias.relative[40])
    assert control.decision.outcome.met


def test_buckets_round_up():
    plain = [c.k for c in run(TOLERANCE, BETAS)]
    rounded = [c.k for c in run(CONTROLLERS["buckets"], BETAS)]
    assert rounded == [next(b for b in (4, 16, 64) if b >= k) for k in plain]
    powers = [c.k for c in run(CONTROLLERS["powers"], BETAS)]
    assert all(p >= k > p // 2 and p & (p - 1) == 0 for p, k in zip(powers, plain, strict=True))
    assert CONTROLLERS["powers"].k_max == 64


def test_rate_limit_moves_step_by_step_to_the_same_place():
    ks = [c.k for c in run(CONTROLLERS["rate"], [1.05] * 8)]
    assert ks[0] == 11  # 1.5 * 7, rounded outwards
    assert all(b <= np.ceil(1.5 * a) for a, b in itertools.pairwise(ks))
    assert ks[-1] == 50
    small = at.truncate.RateLimited(tolerate(delta=0.2, lags=60, k_init=1))
    assert next(run(small, [0.9])).k == 2


def test_a_slow_fall_takes_its_time_and_a_rise_does_not():
    rule = tolerate(delta=0.2, k_max=50, lags=60, k_init=40)
    slow = at.truncate.RateLimited(rule, factor=math.inf, fall=1.25)
    ks = [c.k for c in run(slow, [0.5] * 12 + [1.05])]
    assert ks[:3] == [32, 25, 20]  # 40 / 1.25, and so on, rounded outwards
    assert ks[11] == [c.k for c in run(rule, [0.5] * 12)][-1]
    assert ks[12] == 50
    with pytest.raises(ValueError, match="fall must exceed 1"):
        at.truncate.RateLimited(rule, fall=0.9)


def test_a_k_that_was_changed_is_not_called_the_smallest():
    control = at.truncate.Bucketed(TOLERANCE, (16, 64)).update(
        at.truncate.Bucketed(TOLERANCE, (16, 64)).init(), profile(0.5)
    )
    assert (control.k, control.decision.outcome) == (16, at.estimate.Outcome.MET)
    assert "k=16 meets" in control.decision.message


def test_the_norms_behind_an_estimate_are_those_that_were_fitted():
    for controller in (TOLERANCE, at.truncate.Bucketed(TOLERANCE)):
        *_, last = run(controller, [0.5, 0.9])
        kept = controller.brief(last, profile(0.9, 1))["decay"]
        assert kept["lags"] == list(range(61))
        assert at.fit_decay(kept["phi"]).beta == pytest.approx(last.decision.beta, rel=1e-3)
        np.testing.assert_allclose(kept["phi"], profile(0.9, 1).mean, rtol=1e-3)


def test_a_k_on_its_way_up_is_held_back_and_not_too_small_a_k_max():
    rule = tolerate(0.1, k_max=50, lags=60, k_init=2)
    (control,) = run(at.truncate.RateLimited(rule), [0.9])
    assert (control.k, control.decision.outcome) == (4, at.estimate.Outcome.HELD_BACK)
    assert f"held at 4, where the bias is {control.decision.relative_bias:.3g}" in (
        control.decision.message
    )
    assert f"{control.inner.k} was chosen" in control.decision.message
    assert not control.decision.outcome.met


def test_a_wrapper_keeps_what_the_wrapped_controller_could_not_do():
    rule = tolerate(0.1, k_max=10, lags=60)
    (control,) = run(at.truncate.Limited(rule, 1, 5), [0.9])
    assert control.inner.decision.outcome is at.estimate.Outcome.BEYOND_MAXIMUM
    assert (control.k, control.decision.outcome) == (5, at.estimate.Outcome.BEYOND_MAXIMUM)
    assert control.decision.message.startswith(control.inner.decision.message)
    assert "held at 5" in control.decision.message
    assert control.decision.relative_bias > control.inner.decision.relative_bias


@pytest.mark.parametrize(
    "make",
    [
        lambda: at.FixedTruncation(-1),
        lambda: at.BiasTolerance(delta=1.5, gauge=at.truncate.PaperGauge()),
        lambda: at.BiasTolerance(delta=0.1, k_min=5, k_max=4, gauge=at.truncate.PaperGauge()),
        lambda: at.BiasTolerance(delta=0.1, k_init=101, gauge=at.truncate.PaperGauge()),
        lambda: at.BiasTolerance(delta=0.1, lags=1, gauge=at.truncate.PaperGauge()),
        lambda: at.truncate.Limited(TOLERANCE, low=3, high=2),
        lambda: at.truncate.Bucketed(TOLERANCE, (4, 2)),
        lambda: at.truncate.RateLimited(TOLERANCE, factor=1.0),
    ],
)
def test_options_are_checked_at_construction(make):
    with pytest.raises(ValueError, match="got"):
        make()


def test_delta_has_no_default():
    with pytest.raises(TypeError, match="delta"):
        at.BiasTolerance(gauge=at.truncate.PaperGauge())


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: at.FixedTruncation(2.5), "k"),
        (lambda: at.FixedTruncation(True), "k"),
        (lambda: at.BiasTolerance(0.1, k_min=1.5), "k_min"),
        (lambda: at.BiasTolerance(0.1, k_max=1e12), "k_max"),
        (lambda: at.BiasTolerance(0.1, lags=20.0), "lags"),
        (lambda: at.BiasTolerance(0.1, k_init=True), "k_init"),
        (lambda: at.truncate.Limited(at.FixedTruncation(2), 1.0, 3), "low"),
        (lambda: at.Unbiased(2.5), "k_max"),
    ],
)
def test_steps_are_whole_numbers(make, name):
    with pytest.raises(TypeError, match=f"{name} must be a whole number of steps, got"):
        make()
    assert at.FixedTruncation(np.int64(3)).k == 3
