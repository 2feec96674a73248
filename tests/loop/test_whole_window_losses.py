"""Losses of a window as a whole (PPO, ESR, normalised errors) have the gradient of a loop by hand.

The loop by hand runs step by step, multiplies the state by (1 - done) and calls the loss once.
"""

import warnings
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributions import Categorical

import adaptive_tbptt as at
from adaptive_tbptt.measure import LevelRequest, level_gradients
from adaptive_tbptt.measure.sampling import Source
from adaptive_tbptt.model.objective import Objective
from adaptive_tbptt.truncate import unbiased

STEPS, ROWS, ACTIONS = 30, 4, 3


class ActorCritic(nn.Module):
    """Two heads, no methods core and head."""

    def __init__(self, batch_first):
        super().__init__()
        self.batch_first = batch_first
        self.lstm = nn.LSTM(2, 5, batch_first=batch_first)
        self.actor, self.critic = nn.Linear(5, ACTIONS), nn.Linear(5, 1)

    def forward(self, x, state):
        hidden, state = self.lstm(x, state)
        return {"logits": self.actor(hidden), "value": self.critic(hidden)[..., 0]}, state


def ppo(outputs, targets):
    chosen = Categorical(logits=outputs["logits"])
    ratio = (chosen.log_prob(targets["action"]) - targets["log_prob"]).exp()
    advantage = targets["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
    value = (outputs["value"] - targets["value"]).square().mean()
    return policy + 0.5 * value - 0.01 * chosen.entropy().mean()


def error_to_signal(time):
    """ESR with pre-emphasis: a filter over time, then the energy of the whole window."""

    def emphasised(x):
        return x.narrow(time, 1, x.shape[time] - 1) - 0.95 * x.narrow(time, 0, x.shape[time] - 1)

    def loss(outputs, targets):
        error = emphasised(outputs["value"] - targets["value"]).square().sum()
        return error / emphasised(targets["value"]).square().sum()

    return loss


def normalised(outputs, targets):
    """Divided by what the batch itself produces, so no two steps have losses of their own."""
    value = (outputs["value"] - outputs["value"].mean()) / outputs["value"].std()
    return (value - targets["value"]).square().mean().sqrt()


LOSSES = {
    "ppo": lambda time: ppo,
    "esr": error_to_signal,
    "normalised": lambda time: normalised,
}


class Case:
    def __init__(self, kind, batch_first=False, steps=STEPS):
        torch.manual_seed(0)
        self.model = ActorCritic(batch_first).double()
        self.loss_fn = LOSSES[kind](int(batch_first))
        self.x = torch.randn(steps, ROWS, 2).double()
        self.targets = {
            "action": torch.randint(ACTIONS, (steps, ROWS)),
            "log_prob": -torch.rand(steps, ROWS).double(),
            "advantage": torch.randn(steps, ROWS).double(),
            "value": torch.randn(steps, ROWS).double(),
        }
        self.resets = torch.zeros(steps, ROWS, dtype=torch.bool)
        for step, row in ((3, 0), (9, 1), (12, 1), (14, 3), (17, 0), (22, 2), (27, 3)):
            self.resets[step, row] = True
        self.stream = at.SequenceStream(self.x, self.targets, self.resets)

    def gradient(self, start, first, stop):
        """Of the loss of steps `first` to `stop`, cut before step `start`."""
        zero = torch.zeros(1, ROWS, 5).double()
        state, found = (zero, zero), []
        turned = self.model.batch_first
        for t in range(stop):
            if t == start:
                state = tuple(leaf.detach() for leaf in state)
            keep = (~self.resets[t]).double()[:, None]
            x = self.x[t : t + 1]
            out, state = self.model(
                x.transpose(0, 1) if turned else x, tuple(keep * leaf for leaf in state)
            )
            found.append(out)
        outputs = {
            name: torch.cat([out[name] for out in found[first:]], int(turned)) for name in found[0]
        }
        targets = {name: y[first:stop] for name, y in self.targets.items()}
        if turned:
            targets = {name: y.transpose(0, 1) for name, y in targets.items()}
        self.model.zero_grad()
        self.loss_fn(outputs, targets).backward()
        return self.flat()

    def flat(self):
        given = (p.grad if p.grad is not None else p * 0 for p in self.model.parameters())
        return torch.cat([g.detach().flatten() for g in given])


def same(a, b):
    return torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", LOSSES)
def test_windows_with_context_and_resets_inside(kind, batch_first):
    case = Case(kind, batch_first)
    tbptt = at.AdaptiveTBPTT(case.model, case.loss_fn, 7, losses=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for window in tbptt.windows(case.stream):
            case.model.zero_grad()
            window.backward()
            found = case.flat().clone()
            assert same(found, case.gradient(window.start, window.first, window.stop))
    assert window.start == 13


@pytest.mark.parametrize("held", [400, 4])
@pytest.mark.parametrize("kind", LOSSES)
def test_every_level(kind, held):
    case = Case(kind)
    objective = Objective.of(case.model, case.loss_fn)
    contexts, parameters = (0, 1, 4, 16), list(case.model.parameters())
    window = case.stream.segment(4, STEPS)
    with torch.no_grad():
        state = at.model.advance(objective.recurrent, case.stream.segment(0, 4), None)
    found = level_gradients(objective, window, state, contexts, parameters, held_steps=held)
    for level, context in enumerate(contexts):
        flat = torch.cat(
            [
                (p * 0 if g is None else g).detach().flatten()
                for p, g in zip(parameters, found.up_to(level), strict=True)
            ]
        )
        assert same(flat, case.gradient(20 - context, 20, STEPS))


@pytest.mark.parametrize("kind", LOSSES)
def test_what_diagnose_measures(kind):
    """On a stream as long as a segment, where the segment is known."""
    case = Case(kind)
    objective = Objective.of(case.model, case.loss_fn)
    source = Source(objective, case.stream, 4, torch.Generator().manual_seed(0))
    sums = LevelRequest((0, 4, 16), losses=10, segments=1).measure(source)
    for level, context in enumerate((0, 4, 16)):
        found = torch.from_numpy(sums.vectors[0, : level + 1].sum(0)).double() / sums.counts[0]
        expected = case.gradient(20 - context, 20, STEPS)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    sampling = at.diagnosis.Sampling(burn_in=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        at.diagnose(
            case.model, case.loss_fn, case.stream, 10, segments=10, sampling=sampling, show=False
        )


@pytest.mark.parametrize("kind", LOSSES)
def test_the_mean_over_the_draws_of_unbiased(kind, monkeypatch):
    case, rule = Case(kind), at.Unbiased(20)
    levels = ((0, 1.0), *rule.levels(5), (None, 0.0))
    mean = torch.zeros_like(case.gradient(20, 20, 25))
    for (context, p), (_, q) in pairwise(levels):
        number = (p + q) / 2
        monkeypatch.setattr(unbiased, "draw", lambda seed, window, number=number: number)
        tbptt = at.AdaptiveTBPTT(case.model, case.loss_fn, rule, losses=5)
        for window in tbptt.windows(at.SequenceStream(case.x, case.targets, case.resets)):
            case.model.zero_grad()
            window.backward()
            if window.first == 20:
                assert window.start == 20 - context
                mean += (p - q) * case.flat()
    assert same(mean, case.gradient(0, 20, 25))


class OwnLoss(nn.Module):
    """Computes its loss itself if it is given labels, as models of Hugging Face do."""

    def __init__(self):
        super().__init__()
        self.layer, self.readout = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, tokens, labels=None, state=None):
        out, state = self.layer(nn.functional.one_hot(tokens, 3).double(), state)
        logits = self.readout(out)
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), labels)
        return SimpleNamespace(loss=loss, logits=logits, state=state)


class Wrapped(nn.Module):
    """The labels go in with the tokens, the loss comes out."""

    batch_first = True

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs, state):
        tokens, labels = inputs
        found = self.model(tokens, labels=labels, state=state)
        return found.loss, found.state


def test_a_model_that_returns_its_loss():
    torch.manual_seed(0)
    model = OwnLoss().double()
    tokens, labels = torch.randint(3, (ROWS, STEPS)), torch.randint(3, (ROWS, STEPS))
    stream = at.SequenceStream((tokens, labels), labels, batch_first=True)
    tbptt = at.AdaptiveTBPTT(Wrapped(model), lambda loss, _: loss, 7, losses=10)
    for window in tbptt.windows(stream):
        model.zero_grad()
        loss = window.backward().item()
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        model.zero_grad()
        state, a, b = None, window.start, window.first
        if a:
            with torch.no_grad():
                state = model(tokens[:, :a], labels[:, :a]).state
        if b > a:
            state = model(tokens[:, a:b], labels[:, a:b], state).state
        whole = model(tokens[:, b : window.stop], labels[:, b : window.stop], state).loss
        whole.backward()
        assert loss == pytest.approx(whole.item(), rel=1e-12)
        assert same(found, torch.cat([p.grad.flatten() for p in model.parameters()]))


class Flat(ActorCritic):
    """Outputs in one dimension, as in pytorch/examples' word_language_model."""

    def __init__(self, batch_first, swapped=False):
        super().__init__(batch_first)
        self.swapped = swapped

    def forward(self, x, state):
        outputs, state = super().forward(x, state)
        value = outputs["value"]
        return (value.mT if self.swapped else value).flatten(), state


def normalised_value(outputs, targets):
    return normalised({"value": outputs}, {"value": targets["value"].flatten()})


def mean_of_swapped(outputs, targets):
    return (outputs - targets["value"].mT.flatten()).square().mean()


FLAT = {
    "joined": (normalised, Flat, normalised_value),
    # In the other order they are not joined. A mean over pieces is right whatever their order.
    "swapped": (
        lambda outputs, targets: (outputs["value"] - targets["value"]).square().mean(),
        lambda batch_first: Flat(batch_first, swapped=True),
        mean_of_swapped,
    ),
}


@pytest.mark.parametrize("kind", FLAT)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("recompute", [None, 2])
def test_flat_outputs_where_resets_and_recomputing_cut_them(kind, batch_first, recompute):
    loss_fn, make, flat_loss_fn = FLAT[kind]
    case = Case("normalised", batch_first)

    def gradients(model, loss_fn, recompute=None):
        model.load_state_dict(case.model.state_dict())
        tbptt = at.AdaptiveTBPTT(model, loss_fn, 3, losses=9, recompute=recompute)
        losses = [window.backward() for window in tbptt.windows(case.stream)]
        return [*losses, model.critic.weight.grad, model.lstm.weight_hh_l0.grad]

    expected = gradients(ActorCritic(batch_first).double(), loss_fn)
    found = gradients(make(batch_first).double(), flat_loss_fn, recompute)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("batch_first", [False, True])
def test_padding_is_not_cut_out_of_outputs_in_the_other_order(batch_first):
    model = Flat(batch_first, swapped=True)
    data = [(torch.randn(n, 2), torch.randn(n)) for n in (9, 4, 12, 6, 3)]
    stream = at.SequenceStream.from_sequences(data, rows=3)
    with pytest.raises(ValueError, match=r"or flattened in this order, 9\. Return them so"):
        at.evaluate(model, lambda out, target: (out - target.mT.flatten()).square().mean(), stream)
