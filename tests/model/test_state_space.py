"""State-space layers of the example: scans against loops, windows against autograd by hand."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import adaptive_tbptt as at
from adaptive_tbptt.data import leaves, map_leaves

pytestmark = pytest.mark.usefixtures("double")
STEPS, ROWS, UNITS = 40, 3, 5


def load_example():
    path = Path(__file__).parents[2] / "examples" / "state_space.py"
    spec = importlib.util.spec_from_file_location("state_space", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()
LAYERS = {
    "lru": lambda: example.LRU(2, UNITS, 1),
    "selective": lambda: example.Selective(2, UNITS, 1),
}


def data():
    return torch.randn(STEPS, ROWS, 2), torch.randn(STEPS, ROWS, 1)


@pytest.mark.parametrize("number", [torch.float64, torch.complex128])
@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_the_chunked_scan_is_the_loop(chunk, number):
    keep, new = (torch.randn(STEPS, ROWS, UNITS, dtype=number) for _ in range(2))
    state = h = torch.randn(ROWS, UNITS, dtype=number)
    by_hand = []
    for k, n in zip(keep, new, strict=True):
        h = k * h + n
        by_hand.append(h)
    hidden, last = example.scan(keep, new, state, chunk)
    torch.testing.assert_close(hidden, torch.stack(by_hand))
    torch.testing.assert_close(last, h)


@pytest.mark.parametrize("name", LAYERS)
def test_steps_one_by_one_give_the_same(name):
    model, (x, _) = LAYERS[name](), data()
    features, last = model.core(x, None)
    state, by_step = None, []
    for t in range(STEPS):
        some, state = model.core(x[t : t + 1], state)
        by_step.append(some)
    torch.testing.assert_close(torch.cat(by_step), features)
    for a, b in zip(leaves(state), leaves(last), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("recompute", [None, 4])
def test_windows_have_the_gradient_of_autograd_by_hand(name, recompute):
    model, (x, y) = LAYERS[name](), data()
    states, state = [None], None
    with torch.no_grad():
        for t in range(STEPS):
            _, state = model.core(x[t : t + 1], state)
            states.append(state)
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, 6, losses=10, recompute=recompute)
    for window in tbptt.windows(at.SequenceStream(x, y)):
        window.backward()
        ours = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        features, _ = model.core(x[window.start : window.stop], states[window.start])
        outputs = model.head(features[window.first - window.start :])
        F.mse_loss(outputs, y[window.first : window.stop]).backward()
        for gradient, p in zip(ours, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, p.grad, rtol=1e-9, atol=1e-12)
        model.zero_grad()


@pytest.mark.parametrize("name", LAYERS)
def test_a_reset_starts_the_layer_anew(name):
    model, (x, y) = LAYERS[name](), data()
    resets = torch.zeros(STEPS, ROWS, dtype=torch.bool)
    resets[25, 1] = True
    stream = at.SequenceStream(x, y, resets)
    whole = at.evaluate(model, F.mse_loss, stream)
    features, _ = model.core(x, None)
    again, _ = model.core(x[25:], None)
    features = torch.cat([features[:25], features[25:]])
    features[25:, 1] = again[:, 1]
    assert whole == pytest.approx(F.mse_loss(model.head(features), y).item(), rel=1e-9)


@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_found_amiss(name):
    assert at.check(LAYERS[name](), F.mse_loss, data()) == []


def test_the_gradient_decays_as_the_poles_do():
    """phi_k of the LRU is the norm of lambda^k times the readout."""
    model, (x, y) = LAYERS["lru"](), data()
    profile = at.probe(model, F.mse_loss, x, y)
    with torch.no_grad():
        error = 2 * (model.head(model.core(x, None)[0][-1]) - y[-1])
        weight = model.readout.weight[0]
        radius = torch.exp(-torch.exp(model.log_decay))
        size = (weight[:UNITS] ** 2 + weight[UNITS:] ** 2).sqrt()
        lags = torch.arange(STEPS + 1)[:, None]
        norms = (radius**lags * size).norm(dim=1)[:, None] * error.abs().T
    torch.testing.assert_close(torch.as_tensor(profile.state_norms), norms)


def test_states_are_nests():
    state = LAYERS["selective"]().core(data()[0], None)[1]
    assert map_leaves(lambda leaf: tuple(leaf.shape), state) == {
        "past": (3, ROWS, UNITS),
        "hidden": (ROWS, UNITS, 4),
    }
