"""`find-lr`: short runs at several learning rates, and the rules that choose one of them."""

import math

import pytest

from adaptive_tbptt import evaluate
from atbptt_paper.experiments import find_lr
from atbptt_paper.experiments.find_lr import Trial, choose, try_rate
from paper_helpers import TINY, call


def trial(lr, valid, *, last=1.0):
    return Trial(lr, first=2.0, last=last, updates=10, valid=valid)


FOUR = [trial(0.1, 1.4), trial(1.0, 1.1), trial(10.0, 1.3), trial(100.0, 0.5, last=9.0)]


@pytest.mark.parametrize(
    ("trials", "rule", "rate"),
    [
        (FOUR, "loss", 1.0),  # the rate that diverged has a lower loss
        (FOUR, "paper", 10.0),
        ([trial(1.0, 1.1), trial(0.1, 1.1)], "loss", 0.1),  # of equal ones the smaller
        ([trial(0.1, 3.0), trial(1.0, math.nan)], "loss", 0.1),
        ([trial(0.1, 3.0), trial(1.0, math.inf)], "paper", 0.1),
        ([trial(0.1, -4.5), trial(1.0, -4.9)], "loss", 1.0),
    ],
)
def test_the_rate_that_a_rule_takes(trials, rule, rate):
    assert choose(trials, rule).lr == rate


def test_nothing_is_taken_if_every_rate_diverged():
    assert choose([FOUR[-1]]) is None
    with pytest.raises(ValueError, match="did you mean loss"):
        choose(FOUR, "los")


def test_what_counts_as_diverged():
    assert not Trial(0.1, -4.5, -4.9, 300, -4.9).diverged  # a negative loss that falls
    assert Trial(0.1, -4.5, -3.9, 300, -3.9).diverged
    assert Trial(0.1, 1.0, 1.2, 300, 1.2).diverged
    assert Trial(0.1, 1.0, 0.9, 300, math.inf).diverged


def test_a_short_run_ends_with_the_validation_loss():
    config = TINY.changed(k=4)
    counted = []
    still = try_rate(config, 1e-30, 7, lambda: counted.append(1))
    untrained = evaluate(
        config.model(), config.loss_fn, config.streams()["valid"], chunk=config.eval_chunk
    )
    assert still.valid == untrained  # nothing moved
    assert len(counted) == still.updates == 7
    assert try_rate(config, 1.0, 30).valid < untrained
    with pytest.raises(ValueError, match="updates must be at least 1"):
        try_rate(config, 1.0, 0)


def test_a_rate_that_blows_up_has_diverged():
    small, large = (try_rate(TINY.changed(k=4, clip=0.0), lr, 30) for lr in (1e-3, 1e4))
    assert small.first == large.first  # before any update
    assert (small.diverged, large.diverged) == (False, True)


def ask(monkeypatch, *args, code=0):
    """Run the command on made-up trials, of rates 0.1 to 100."""
    made = {t.lr: t for t in FOUR}
    monkeypatch.setattr(find_lr, "try_rate", lambda config, lr, *_: made[lr])
    return call("find-lr", "copy", "--preset", "quick", *args, code=code)


def test_the_command_says_which_rate_it_took_and_why(monkeypatch):
    text = ask(monkeypatch, "--lowest", "-1")
    assert "take 1: the lowest validation loss (1.1000) of the 3 of 4 rates that did not " in text
    assert "did not diverge at K=10" in text  # K_0 of the preset
    assert "was tried" not in text
    for i, lr in enumerate(("0.1", "1", "10", "100"), 1):
        assert f"rate {lr}, {i} of 4: validation loss" in text  # progress
    for loss in ("1.4000", "1.1000", "1.3000", "0.5000"):
        assert loss in text.partition("first loss")[2]  # the table
    paper = ask(monkeypatch, "--lowest", "-1", "--rule", "paper")
    assert "take 10: the largest rate of the 3 of 4 rates that did not diverge" in paper


def test_the_command_says_so_if_the_best_rate_is_at_the_edge(monkeypatch):
    assert "no larger rate was tried: raise --highest" in ask(
        monkeypatch, "--lowest", "-1", "--highest", "0"
    )
    assert "no smaller rate was tried: lower --lowest" in ask(
        monkeypatch, "--lowest", "0", "--highest", "1"
    )
    assert "every rate diverged; lower --lowest" in ask(monkeypatch, "--lowest", "2", code=2)
    assert "--lowest 3 is above --highest 2" in ask(monkeypatch, "--lowest", "3", code=2)


def test_wrong_names_are_refused_before_anything_is_trained():
    assert "unknown task 'cop'; did you mean copy?" in call("find-lr", "cop", code=2)
    assert "did you mean paper?" in call("find-lr", "copy", "--rule", "papr", code=2)
    assert "unknown preset" in call("find-lr", "copy", "--preset", "quik", code=2)


def test_the_command_trains():
    text = call("find-lr", "copy", "--preset", "quick", "--updates", "10", "--lowest", "-2",
                "--highest", "-1", "--k", "4", "--rule", "paper")  # fmt: skip
    assert "take 0.1: the largest rate of the 2 of 2 rates that did not diverge at K=4" in text
