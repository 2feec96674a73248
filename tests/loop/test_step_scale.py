"""The rate is scaled during a step and at no other time."""

import math
from types import SimpleNamespace

import pytest
import torch

import adaptive_tbptt as at


def weight():
    w = torch.nn.Parameter(torch.zeros(1))
    w.grad = torch.ones(1)
    return w


def window(losses):
    return SimpleNamespace(rated_losses=losses)


@pytest.mark.parametrize(("rule", "factor"), [("sqrt", 3.0), ("linear", 9.0), ("none", 1.0)])
def test_the_step_is_scaled_and_the_rate_is_not(rule, factor):
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.1)
    scale = at.StepScale(optimizer, rule)
    scale.step(window(9))
    optimizer.step()
    assert w.item() == pytest.approx(-0.1 * factor)
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, 30),
        lambda o: torch.optim.lr_scheduler.LinearLR(o),
    ],
)
def test_schedulers_never_see_the_scaled_rate(make):
    ks = [2, 50, 3, 100, 7, 1, 80]
    plain, scaled = (torch.optim.SGD([weight()], lr=0.1) for _ in range(2))
    scale = at.StepScale(scaled)
    schedulers = make(plain), make(scaled)
    for k in ks:
        scale.step(window(k))
        plain.step()
        scaled.step()
        for scheduler in schedulers:
            scheduler.step()
        assert plain.param_groups[0]["lr"] == scaled.param_groups[0]["lr"]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.Adadelta(p, lr=0.5),
        lambda p: torch.optim.RMSprop(p, lr=0.1),
    ],
)
def test_any_optimiser_takes_the_step_it_would_take_at_that_rate(make):
    ours, theirs = weight(), weight()
    a, b = make([ours]), make([theirs])
    base = b.param_groups[0]["lr"]
    scale = at.StepScale(a, "sqrt")
    for k in (4, 25, 9):
        scale.step(window(k))
        b.param_groups[0]["lr"] = base * math.sqrt(k)
        for optimizer, w in ((a, ours), (b, theirs)):
            w.grad = w.detach() - 1.0
            optimizer.step()
        assert torch.equal(ours, theirs)


def test_tensor_rates_and_a_step_that_raises():
    w = weight()
    optimizer = torch.optim.SGD([w], lr=torch.tensor(0.1))
    scale = at.StepScale(optimizer)
    scale.step(window(4))

    def fails():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(fails)
    optimizer.step()
    assert w.item() == pytest.approx(-0.2)
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.1)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(fails)
    scale.remove()
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.1)
    optimizer.step()
    assert w.item() == pytest.approx(-0.3)


def test_a_second_scale_takes_the_place_of_the_first():
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.1)
    at.StepScale(optimizer).step(window(100))
    at.StepScale(optimizer).step(window(4))
    optimizer.step()
    assert w.item() == pytest.approx(-0.2)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_an_optimiser_that_steps_through_another_is_scaled_once():
    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    torch.optim.SGD([weight()], lr=1.0)  # from now on torch calls hooks in both classes
    w = weight()
    optimizer = Mine([w], lr=0.1)
    at.StepScale(optimizer).step(window(4))
    optimizer.step()
    assert w.item() == pytest.approx(-0.2)
    assert optimizer.param_groups[0]["lr"] == 0.1


class MySGD(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (torch.optim.SGD, "sqrt"),
        (lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, nesterov=True), "sqrt"),
        (MySGD, "sqrt"),
        (torch.optim.ASGD, "sqrt"),
        (torch.optim.Adam, "none"),
        (torch.optim.AdamW, "none"),
        (torch.optim.NAdam, "none"),
        (torch.optim.Adamax, "none"),
        (torch.optim.Adagrad, "none"),
        (torch.optim.Adadelta, "none"),
        (torch.optim.RMSprop, "none"),
        (torch.optim.Rprop, "none"),
    ],
)
def test_the_rule_follows_the_optimiser_unless_it_is_given(make, rule):
    w = weight()
    optimizer = make([w], lr=0.1)
    assert at.StepScale(optimizer).rule == rule
    for given in ("sqrt", "linear", "none"):
        assert at.StepScale(optimizer, given).rule == given


def test_adam_takes_its_own_step_by_default():
    ours, theirs = weight(), weight()
    a, b = torch.optim.Adam([ours], lr=0.1), torch.optim.Adam([theirs], lr=0.1)
    scale = at.StepScale(a)
    for losses in (4, 25, 9):
        scale.step(window(losses))
        a.step()
        b.step()
    assert torch.equal(ours, theirs)


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="sqrt, linear, none"):
        at.StepScale(torch.optim.SGD([weight()], lr=0.1), "log")


@pytest.mark.parametrize("old", [4, 4.0, None])
def test_a_number_instead_of_the_window_gets_a_sentence(old):
    scale = at.StepScale(torch.optim.SGD([weight()], lr=0.1))
    with pytest.raises(TypeError, match=rf"got {type(old).__name__}: write scale\.step\(window\)"):
        scale.step(old)


def test_the_last_window_of_an_epoch_takes_a_step_for_the_losses_it_carries():
    model, x = torch.nn.RNN(1, 1), torch.ones(10, 1, 1)
    scale = at.StepScale(torch.optim.SGD(model.parameters(), lr=0.1), "linear")
    tbptt = at.AdaptiveTBPTT(model, torch.nn.MSELoss(), at.FixedTruncation(3), losses=4)
    factors = []
    for found in tbptt.windows(at.SequenceStream(x, x)):
        found.backward()
        scale.step(found)
        factors.append(scale.factor)
    assert factors == [4.0, 4.0, 2.0]


def test_clipping_at_a_norm_or_at_a_norm_per_loss():
    for clip, limit in ((at.loop.Clip(0.5), 0.5), (at.loop.Clip(1.0, per_loss=True), 0.1)):
        w = torch.nn.Parameter(torch.zeros(4))
        w.grad = torch.full((4,), 3.0)
        assert clip([w], losses=10).item() == pytest.approx(6.0)
        assert w.grad.norm().item() == pytest.approx(limit, rel=1e-5)
    with pytest.raises(ValueError, match="positive"):
        at.loop.Clip(0.0)
