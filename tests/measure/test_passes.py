"""A long window in segments gives what it gives at once."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at
from adaptive_tbptt.data import Segment
from adaptive_tbptt.data.nest import leaves
from adaptive_tbptt.measure.fused_layer import find_fused_layer, fused_pass
from adaptive_tbptt.measure.passes import Replay, StepPass

from ..oracle import DictState

pytestmark = pytest.mark.usefixtures("double")
STEPS, ROWS = 13, 4


def assert_same(a, b):
    np.testing.assert_allclose(a.state_norms, b.state_norms, rtol=1e-10)
    np.testing.assert_allclose(a.cumulative_gradient, b.cumulative_gradient, rtol=1e-8, atol=1e-14)
    for name, norms in b.component_norms.items():
        np.testing.assert_allclose(a.component_norms[name], norms, rtol=1e-10)


@pytest.mark.parametrize("held", [1, 2, 5, 12, 13])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_the_length_of_the_segments_does_not_matter(kind, fused, resets, held):
    model = kind(3, 5, 2)
    x, y = torch.randn(STEPS, ROWS, 3), torch.randn(STEPS, ROWS, 5)
    options = {"burn_in": 1}
    if resets:
        options["resets"] = torch.rand(STEPS, ROWS) < 0.1
    whole, parts = (
        at.probe(
            model, F.mse_loss, x, y, settings=at.measure.ProbeSettings(fused, steps), **options
        )
        for steps in (100, held)
    )
    assert_same(parts, whole)


class Counting(nn.Module):
    """A state with an integer that is no tensor, one that is, and a part without gradient."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 4)

    def forward(self, x, state):
        rows = x.shape[1]
        if state is None:
            state = (torch.zeros(rows, 4), 0, torch.zeros(rows, dtype=torch.long), torch.ones(rows))
        h, number, count, constant = state
        out = []
        for xt in x:
            h = self.cell(xt * (1.0 + 0.1 * (number % 3)) + 0.1 * (count % 2)[:, None], h)
            number, count, constant = number + 1, count + 1, constant.detach() + 1.0
            out.append(h)
        return torch.stack(out), (h, number, count, constant)

    def initial_state(self, rows):
        return (torch.zeros(rows, 4), 0, torch.zeros(rows, dtype=torch.long), torch.ones(rows))


@pytest.mark.parametrize("held", [1, 4])
def test_counters_go_on_and_what_has_no_gradient_has_norm_zero(held):
    model = Counting()
    x, y = torch.randn(STEPS, ROWS, 3), torch.randn(STEPS, ROWS, 4)
    settings = at.measure.ProbeSettings(held_steps=held)
    profile = at.probe(model, F.mse_loss, x, y, settings=settings)
    state = torch.zeros(ROWS, 4, requires_grad=True)
    entering, h = [], state
    for t in range(STEPS):
        entering.append(h)
        h = model.cell(x[t] * (1.0 + 0.1 * (t % 3)) + 0.1 * (t % 2), h)
    found = torch.autograd.grad(F.mse_loss(h, y[-1]) * ROWS, entering)
    expected = torch.stack([g.norm(dim=1) for g in reversed(found)]).numpy()
    np.testing.assert_allclose(profile.state_norms[1:], expected, rtol=1e-10)
    assert not np.nan_to_num(profile.component_norms["3"]).any()


class Noisy(nn.Module):
    """Dropout before, inside and on top of the layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.drop = layer, nn.Dropout(0.4)

    def forward(self, x, state):
        out, state = self.layer(self.drop(x), state)
        return self.drop(out), state


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("hold", [True, False])
def test_a_part_that_is_run_again_draws_the_same_dropout(fused, hold):
    model = at.model.as_recurrent(Noisy(nn.LSTM(3, 8, 2, dropout=0.5)).train())
    window = Segment(torch.randn(STEPS, ROWS, 3), torch.randn(STEPS, ROWS, 8))
    state = model.initial_state(window.inputs)
    layer = find_fused_layer(model, window.inputs, state)
    assert layer is not None
    runs = []

    def run(part, state):
        steps = fused_pass(model, layer, part, state) if fused else StepPass(model, part, state)
        runs.append((id(part), leaves(steps.leaving)))
        return steps

    parts = [window.between(start, min(start + 4, STEPS)) for start in range(0, STEPS, 4)]
    replay = Replay(model, parts, state, run, hold=hold)
    forward, runs[:] = dict(runs), []
    gradients = [torch.ones_like(x) for x in leaves(replay.final)]
    for _ in parts:
        gradients = [g[0] for g in replay.pop().backward(gradients)]
    assert [part for part, _ in runs] == ([] if hold else [id(p) for p in parts[-2::-1]])
    for part, again in runs:
        for a, b in zip(again, forward[part], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_dropout_in_the_general_path_does_not_depend_on_the_segments():
    model = Noisy(nn.GRU(3, 5)).train()
    x, y = torch.randn(STEPS, ROWS, 3), torch.randn(STEPS, ROWS, 5)
    profiles = []
    for held in (3, 100):
        torch.manual_seed(1)
        settings = at.measure.ProbeSettings(fused=False, held_steps=held)
        profiles.append(at.probe(model, F.mse_loss, x, y, settings=settings))
    assert_same(*profiles)


def test_nested_states_are_carried_between_segments():
    model, x, y = DictState(), torch.randn(STEPS, ROWS, 3), torch.randn(STEPS, ROWS, 2)

    def loss(out, target):
        return F.mse_loss(out, target.flatten(0, 1))

    whole = at.probe(model, loss, x, y)
    few = at.measure.ProbeSettings(held_steps=2)
    assert_same(at.probe(model, loss, x, y, settings=few), whole)


def test_the_number_of_steps_held_must_be_positive():
    with pytest.raises(ValueError, match="held_steps"):
        at.measure.ProbeSettings(held_steps=0)
