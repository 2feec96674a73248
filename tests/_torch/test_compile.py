"""torch.compile: what was compiled runs compiled, gives the same numbers, and seldom recompiles."""

import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at

from ..oracle import Scripted

pytestmark = [
    pytest.mark.usefixtures("double", "_fresh"),
    # torch looks at every input of a graph, states with a gradient included.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
ROWS, INPUTS, HIDDEN = 2, 3, 4
STREAM = 61  # no multiple of any bucket: every epoch ends in a window of its own size


@pytest.fixture
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that counts, and runs what it is given as it is."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


class Leaky(nn.Module):
    """A loop over time in plain PyTorch: every length is a graph of its own."""

    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(INPUTS + HIDDEN, HIDDEN)

    def forward(self, x, state):
        h = x.new_zeros(x.shape[1], HIDDEN) if state is None else state
        seen = []
        for xt in x:
            h = 0.5 * h + torch.tanh(self.cell(torch.cat([xt, h], -1)))
            seen.append(h)
        return torch.stack(seen), h


class Parts(nn.Module):
    """The same as core and head."""

    def __init__(self):
        super().__init__()
        self.layer, self.readout = Leaky(), nn.Linear(HIDDEN, HIDDEN)

    def core(self, x, state):
        return self.layer(x, state)

    def head(self, features):
        return self.readout(features)


def twins(make):
    torch.manual_seed(1)
    one = make()
    torch.manual_seed(1)
    return one, make()


def data():
    torch.manual_seed(2)
    return torch.randn(STREAM, ROWS, INPUTS), torch.randn(STREAM, ROWS, HIDDEN)


def train(model, controller, epochs=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, controller, estimate_every=14, burn_in=3)
    used = []
    for _ in range(epochs):
        for window in tbptt.windows(at.SequenceStream(*data())):
            window.backward()
            used.append(window.k)
            optimizer.step()
            optimizer.zero_grad()
    return used, [p.detach() for p in model.parameters()]


def script():
    return Scripted([1, 4, 3, 2, 5, 1, 3, 4, 2])


@pytest.mark.parametrize("make", [Leaky, Parts])
def test_k_in_buckets_bounds_what_is_compiled_and_changes_no_number(make):
    eager, model = twins(make)
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs)
    controller = at.truncate.Bucketed(script(), buckets=(2, 5))
    used, ours = train(compiled, controller)
    assert set(used) == {2, 5}
    _, theirs = train(eager, controller)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    # A bucket's core is compiled for no state, for the context's and for one with gradient; its
    # head once.
    assert 2 <= graphs.count <= 2 * (3 if make is Leaky else 4)


def test_a_backend_with_a_backward_pass_of_its_own():
    eager, model = twins(Parts)
    compiled = torch.compile(model, backend="aot_eager")
    _, ours = train(compiled, at.FixedTruncation(2), epochs=1)
    _, theirs = train(eager, at.FixedTruncation(2), epochs=1)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_without_buckets_there_are_many_more():
    graphs = Graphs()
    train(torch.compile(Leaky(), backend=graphs), script())
    assert graphs.count > 2 * 3


def test_measuring_and_catching_up_compile_nothing():
    graphs = Graphs()
    model = torch.compile(Parts(), backend=graphs)
    x, y = data()
    at.probe(model, F.mse_loss, x[:20], y[:20], burn_in=3)
    at.diagnose(model, F.mse_loss, (x, y), losses=5, lags=20, segments=10)
    at.lookback(model, F.mse_loss, (x, y), longest=10)
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, at.FixedTruncation(6))
    windows = iter(tbptt.windows(at.SequenceStream(x, y)))
    for _ in range(5):
        window = next(windows)  # skipped: the next window must catch up
    assert graphs.count == 0
    window.backward()
    assert graphs.count > 0


def test_the_rest_of_an_epoch_compiles_nothing():
    graphs = Graphs()
    model = torch.compile(Leaky(), backend=graphs)
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, at.FixedTruncation(8))
    for window in tbptt.windows(at.SequenceStream(*data())):
        before = graphs.count
        window.backward()
    assert window.steps == STREAM % 8
    assert graphs.count == before > 0


def test_a_trainer_compiles_windows_and_whole_pieces_of_validation_alone(tmp_path):
    eager, model = twins(Leaky)
    graphs = Graphs()
    stream = at.SequenceStream(*data())

    def fit(net, folder, **options):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        tbptt = at.AdaptiveTBPTT(net, F.mse_loss, at.FixedTruncation(8))
        trainer = at.Trainer(
            tbptt, optimizer, run_dir=folder, eval_chunk=20, show=False, tensorboard=False
        )
        trainer.fit(stream, stream, **options)
        return trainer

    trainer = fit(torch.compile(model, backend=graphs), tmp_path, epochs=1)
    # A window with no state, with one and after a context; 20 steps with none and with one.
    assert graphs.count <= 5
    trainer.load_best()
    fit(eager, tmp_path, epochs=2, resume=True)  # its checkpoint is that of the model inside


def test_core_and_head_of_a_compiled_model_run_compiled():
    # Attributes of what torch.compile returns are the original's: calling them compiles nothing.
    graphs = Graphs()
    eager, model = twins(Parts)
    compiled = torch.compile(model, backend=graphs)
    x = data()[0][:5]
    compiled.core(x, None)
    assert graphs.count == 0
    recurrent = at.model.as_recurrent(compiled)
    assert recurrent.has_features
    features, _ = recurrent.core(x, None)
    assert graphs.count == 1
    outputs = recurrent.head(features)
    assert graphs.count == 2
    torch.testing.assert_close(outputs, eager.head(eager.core(x, None)[0]))


def test_compiling_the_parts_oneself_works_too():
    graphs = Graphs()
    eager, model = twins(Parts)
    model.core = torch.compile(model.core, backend=graphs)
    controller = at.FixedTruncation(4)
    _, ours = train(model, controller)
    _, theirs = train(eager, controller)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert 1 <= graphs.count <= 3


def test_compile_in_place_is_said_to_leave_core_and_head_out():
    model = Parts()
    model.compile(backend="eager")
    with pytest.warns(UserWarning, match="compiles forward, but core and head"):
        at.model.as_recurrent(model)
    whole, graphs = Leaky(), Graphs()
    whole.compile(backend=graphs)
    train(whole, at.FixedTruncation(4), epochs=1)
    assert 1 <= graphs.count <= 3


@pytest.mark.parametrize(
    "make", [lambda: nn.GRUCell(INPUTS, HIDDEN), lambda: nn.LSTM(INPUTS, HIDDEN)]
)
def test_compiled_cells_and_layers_are_still_cells_and_layers(make):
    eager, model = twins(make)
    x, y = (part[:20] for part in data())
    compiled = torch.compile(model, backend="eager")
    ours, theirs = (at.probe(m, F.mse_loss, x, y) for m in (compiled, eager))
    assert ours.mean == pytest.approx(theirs.mean, rel=1e-10)
    assert list(ours.component_norms) == list(theirs.component_norms)
    _, trained = train(compiled, at.FixedTruncation(4), epochs=1)
    _, twin = train(eager, at.FixedTruncation(4), epochs=1)
    for a, b in zip(trained, twin, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor():
    eager, model = twins(Leaky)
    _, ours = train(torch.compile(model), at.FixedTruncation(3), epochs=1)
    _, theirs = train(eager, at.FixedTruncation(3), epochs=1)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_a_compiled_loss_is_compiled_once():
    graphs = Graphs()
    loss = torch.compile(lambda out, target: F.mse_loss(out, target), backend=graphs)
    stream = at.SequenceStream(torch.randn(40, ROWS, INPUTS), torch.randn(40, ROWS, HIDDEN))
    tbptt = at.AdaptiveTBPTT(nn.GRU(INPUTS, HIDDEN), loss, at.FixedTruncation(10))
    for window in tbptt.windows(stream):
        window.backward()
    assert graphs.count == 1
