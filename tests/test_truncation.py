"""Every outcome, and the sentence it carries."""

import numpy as np
import pytest

import adaptive_tbptt as at
from adaptive_tbptt import Outcome


def bias(beta, window=100, norms=None, head=0):
    phi = np.concatenate([np.ones(head), beta ** np.arange(window + 1.0 - head)])
    return at.bias_bound(phi, at.fit_decay(phi), norms)


@pytest.mark.parametrize(
    ("curve", "options", "k", "outcome", "says"),
    [
        (bias(0.8), {"delta": 0.1}, 11, Outcome.MET, "k=11 meets delta=0.1"),
        (bias(0.5), {"delta": 0.9, "k_min": 2}, 2, Outcome.MET_AT_MINIMUM, "already at k_min=2"),
        (bias(0.8), {"delta": 0.1, "k_max": 5}, 5, Outcome.BEYOND_MAXIMUM, "no k up to 5"),
        (bias(0.999), {"delta": 0.1}, 100, Outcome.NO_BOUND, "no bound"),
        (bias(1.02), {"delta": 0.5}, 100, Outcome.NO_DECAY, "does not decay (beta=1.02 >= 1"),
        (bias(0.8, 12), {"delta": 0.1}, 11, Outcome.WINDOW_TOO_SHORT, "past tau=10"),
        (bias(0.95, 40), {"delta": 0.1}, 50, Outcome.WINDOW_TOO_SHORT, "longer than 40"),
        (bias(0.95, 40), {"delta": 0.1, "k_max": 45}, 45, Outcome.BEYOND_MAXIMUM, "50 would"),
        (bias(0.8, 12), {"delta": 0.1, "k_min": 20}, 20, Outcome.MET_AT_MINIMUM, "k_min=20"),
        (
            bias(0.8, norms=np.full(101, 1e-12)),
            {"delta": 0.5, "k_max": 50},
            50,
            Outcome.NO_BOUND,
            "using 50",
        ),
    ],
)
def test_outcomes(curve, options, k, outcome, says):
    choice = at.choose_truncation(curve, **options)
    assert (choice.k, choice.outcome) == (k, outcome)
    assert says in choice.message
    assert choice.outcome.met == (choice.relative_bias < options["delta"])
    assert choice.relative_bias == curve.relative_at(choice.k)


def test_beyond_the_maximum_names_the_k_that_would_do():
    choice = at.choose_truncation(bias(0.8), delta=0.1, k_max=5)
    assert choice.message == "no k up to 5 meets delta=0.1; 11 would; using 5"


def test_the_smallest_k_is_the_smallest():
    curve = bias(0.9, head=20)
    for delta in (0.9, 0.5, 0.1, 0.01):
        choice = at.choose_truncation(curve, delta=delta)
        assert curve.relative[choice.k] < delta <= curve.relative[choice.k - 1]
