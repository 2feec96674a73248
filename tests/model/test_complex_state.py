"""A complex state is measured and carried as pairs of real numbers are."""

import pytest
import torch
from torch import nn

import adaptive_tbptt as at

STEPS, ROWS = 60, 3


class Rotating(nn.Module):
    """h' = lambda h + B x with a complex lambda and h, and a real part of the state beside it."""

    def __init__(self, pairs=False):
        super().__init__()
        torch.manual_seed(0)
        size = torch.linspace(0.8, 0.9, 4)
        self.angle = nn.Parameter(torch.linspace(0.1, 1.0, 4))
        self.log_size = nn.Parameter(size.log())
        self.enter = nn.Linear(2, 8)
        self.head = nn.Linear(9, 1)
        self.pairs = pairs

    def core(self, inputs, state):
        rows = inputs.shape[1]
        h, last = state or (torch.zeros(rows, 4, dtype=torch.cfloat), torch.zeros(rows, 1))
        if self.pairs and state:
            h = torch.view_as_complex(h)
        turn = torch.polar(self.log_size.exp(), self.angle)
        features = []
        for x in inputs:
            h = turn * h + torch.view_as_complex(self.enter(x).view(rows, 4, 2))
            last = 0.5 * last + x[:, :1]
            features.append(torch.cat([h.real, h.imag, last], dim=1))
        return torch.stack(features), (torch.view_as_real(h) if self.pairs else h, last)


def data(steps=STEPS):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps, ROWS, 3, generator=generator)
    resets = torch.zeros(steps, ROWS, dtype=torch.bool)
    resets[20, 1] = True
    return x[..., :2], x[..., 2:], resets


def both(measure):
    """Measure the complex model and that of pairs, which is the oracle."""
    return measure(Rotating()), measure(Rotating(pairs=True))


@pytest.mark.parametrize("resets", [False, True])
def test_norms_are_those_of_pairs(resets):
    x, y, starts = data()

    def measure(model):
        return at.probe(
            model, nn.functional.mse_loss, x, y, burn_in=10, resets=starts if resets else None
        )

    ours, theirs = both(measure)
    assert ours.state_norms == pytest.approx(theirs.state_norms, rel=1e-5)
    assert list(ours.component_norms) == list(theirs.component_norms)
    assert ours.state_norms[1].min() > 0


class Halving(nn.Module):
    """h' = 0.5i h + x, read out as Re h + 2 Im h: phi_k = sqrt(5) / 2^k."""

    def core(self, inputs, state):
        features = []
        h = torch.zeros_like(inputs[0], dtype=torch.cfloat) if state is None else state
        for x in inputs:
            h = 0.5j * h + x
            features.append(h)
        return torch.stack(features), h

    def head(self, features):
        return features.real + 2 * features.imag


def test_norms_are_those_of_the_closed_form():
    x = torch.ones(9, 2, 1)
    profile = at.probe(Halving(), lambda out, y: (out - y).mean(), x, x)
    norms = 5**0.5 * 0.5 ** torch.arange(10.0)[:, None].expand(10, 2)
    assert profile.state_norms == pytest.approx(norms.numpy(), rel=1e-6)


def test_windows_have_the_gradient_of_autograd_and_go_on_after_a_checkpoint():
    x, y, resets = data()

    def train(model, stop=None):
        tbptt = at.AdaptiveTBPTT(model, nn.functional.mse_loss, at.FixedTruncation(8))
        stream, gradients = at.SequenceStream(x, y, resets), []
        for i, window in enumerate(tbptt.windows(stream)):
            model.zero_grad()
            window.backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
            if i == stop:  # another process goes on
                saved = tbptt.state_dict(), stream.state_dict()
                model = Rotating(model.pairs)
                tbptt = at.AdaptiveTBPTT(model, nn.functional.mse_loss, at.FixedTruncation(8))
                stream = at.SequenceStream(x, y, resets)
                tbptt.load_state_dict(saved[0])
                stream.load_state_dict(saved[1])
                for later in tbptt.windows(stream):
                    model.zero_grad()
                    later.backward()
                    gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
                break
        return torch.stack(gradients)

    ours, theirs = both(train)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(train(Rotating(), stop=2), theirs)


def test_a_complex_state_may_be_given():
    x, y, _ = data()
    start = (torch.randn(ROWS, 4, dtype=torch.cfloat), torch.zeros(ROWS, 1))
    pairs = (torch.view_as_real(start[0]), start[1])
    ours = at.probe(Rotating(), nn.functional.mse_loss, x, y, start)
    theirs = at.probe(Rotating(pairs=True), nn.functional.mse_loss, x, y, pairs)
    assert ours.state_norms == pytest.approx(theirs.state_norms, rel=1e-5)


class Shifted(Rotating):
    """Adds a complex parameter to its state, or the pairs that it is."""

    def __init__(self, pairs=False):
        super().__init__(pairs)
        generator = torch.Generator().manual_seed(2)
        shift = torch.randn(4, 2, generator=generator)
        self.shift = nn.Parameter(shift if pairs else torch.view_as_complex(shift))

    def core(self, inputs, state):
        features, (h, last) = super().core(inputs, state)
        return features, (h + self.shift, last)


def test_complex_parameters_are_measured_by_level_as_pairs_are():
    x, y, resets = data()
    request = at.measure.LevelRequest((0, 1, 4, 8), losses=3, segments=4)

    def measure(model):
        objective = at.model.Objective.of(model, nn.functional.mse_loss)
        stream, generator = at.SequenceStream(x, y, resets), torch.Generator().manual_seed(0)
        return request.measure(at.measure.Source(objective, stream, 5, generator))

    ours, theirs = measure(Shifted()), measure(Shifted(pairs=True))
    assert ours.size == theirs.size == sum(p.numel() for p in Shifted(pairs=True).parameters())
    assert ours.vectors == pytest.approx(theirs.vectors, rel=1e-4, abs=1e-5)
    assert ours.unreached == theirs.unreached == ()
    assert abs(ours.vectors).max() > 0.1


def test_a_state_that_is_a_conjugate_is_carried():
    class Turned(Rotating):
        def core(self, inputs, state):
            features = []
            for x in inputs:
                feature, (h, last) = super().core(x[None], state)
                state = h.conj(), last
                features.append(feature)
            return torch.cat(features), state

    x, y, _ = data()
    tbptt = at.AdaptiveTBPTT(Turned(), nn.functional.mse_loss, at.FixedTruncation(10))
    losses = [w.backward().item() for w in tbptt.windows(at.SequenceStream(x, y))]
    state, expected, model = None, [], Turned()
    for start in range(0, STEPS, 10):
        features, state = model.core(x[start : start + 10], state)
        expected.append(nn.functional.mse_loss(model.head(features), y[start : start + 10]).item())
    assert losses == pytest.approx(expected, rel=1e-5)


def test_a_stream_starts_from_a_complex_state():
    x, y, resets = data()
    start = torch.randn(ROWS, 4, dtype=torch.cfloat), torch.randn(ROWS, 1)

    def train(model):
        state = (torch.view_as_real(start[0]), start[1]) if model.pairs else start
        stream = at.SequenceStream(x, y, resets, state=state, burn_in=5)
        tbptt = at.AdaptiveTBPTT(model, nn.functional.mse_loss, 10, losses=20)
        losses = [window.backward().item() for window in tbptt.windows(stream)]
        return [*losses, at.evaluate(model, nn.functional.mse_loss, stream)]

    ours, theirs = both(train)
    assert ours == pytest.approx(theirs, rel=1e-6)
    zero = at.evaluate(Rotating(), nn.functional.mse_loss, at.SequenceStream(x, y, resets))
    assert abs(ours[-1] - zero) > 1e-3
