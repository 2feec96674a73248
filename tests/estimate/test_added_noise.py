"""The noise of random levels, against the mean over all draws."""

from itertools import pairwise

import numpy as np
import pytest

import adaptive_tbptt as at
from adaptive_tbptt.estimate.added_noise import added_noise

CONTEXTS = (0, 5, 10, 20, 40)


@pytest.fixture
def sums():
    rng = np.random.default_rng(0)
    sizes = np.array([1.0, 0.5, 0.4, 0.3, 0.2])[:, None]
    # Levels of one window are correlated, as real ones are.
    vectors = sizes * (rng.standard_normal((6, 5, 7)) + rng.standard_normal((6, 1, 7)))
    return at.estimate.LevelSums(CONTEXTS, vectors.astype(np.float32), np.full(6, 3.0), 5)


@pytest.mark.parametrize("always", [0, 5, 10])
@pytest.mark.parametrize("share", [0.2, 1.0, 9.0])
def test_it_is_the_mean_over_all_draws(sums, always, share):
    levels = at.Unbiased(40, share=share).levels(5, always)
    windows = sums.vectors.astype(np.float64)
    chances = {c: next(p for k, p in levels if c <= k) for c in CONTEXTS[1:]} | {0: 1.0}
    weighed = windows / np.array([chances[c] for c in CONTEXTS])[:, None]
    drawn = 0.0
    for (context, p), (_, q) in pairwise([(0, 1.0), *levels, (None, 0.0)]):
        run = [c <= context for c in CONTEXTS]
        drawn += (p - q) * (weighed[:, run].sum(1) ** 2).sum(1).mean()
    whole = (windows.sum(1) ** 2).sum(1).mean()
    assert added_noise(sums, levels) == pytest.approx(drawn / whole - 1.0, rel=1e-6)


def test_a_context_that_always_runs_adds_none(sums):
    assert added_noise(sums, ((40, 1.0),)) == 0.0
    assert added_noise(sums, ()) == 0.0


def test_a_log_keeps_noise_and_cost(sums):
    rule = at.Unbiased(40, share=0.5, base=at.truncate.BestGuess(k_max=40))
    state = rule.update(rule.init(), sums)
    kept = rule.brief(state, sums)["random"]
    assert kept["noise"] == pytest.approx(added_noise(sums, rule.levels(5, state.k)), rel=1e-3)
    assert kept["context"] == pytest.approx(rule.expected_context(5, state.k), rel=1e-3)
