"""Nothing takes the CPU for granted: the same numbers come from another device."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at
from adaptive_tbptt.model import as_recurrent
from adaptive_tbptt.model.running import entering

from .elsewhere import other_device
from .small_run import build, streams
from .symbol_models import SymbolModel, symbol_loss

pytestmark = [
    pytest.mark.filterwarnings("ignore::adaptive_tbptt.TruncationWarning"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration"),  # of torch's mkldnn flags
]

STEPS, ROWS = 80, 4
GAUGES = [
    at.truncate.PaperGauge(),
    at.truncate.ReleaseGauge(),
    at.truncate.MeasuredGauge(size=64),
]


class Cell(nn.Module):
    """A recurrence that no fast path knows."""

    def __init__(self):
        super().__init__()
        self.affine = nn.Linear(7, 4)
        self.register_buffer("scale", torch.full((4,), 0.9))

    def forward(self, x, state):
        state = x.new_zeros(x.shape[1], 4) if state is None else state
        outputs = []
        for step in x:
            state = self.scale * torch.tanh(self.affine(torch.cat([step, state], -1)))
            outputs.append(state)
        return torch.stack(outputs), state


MODELS = {
    "lstm": lambda: nn.LSTM(3, 4),
    "two layers": lambda: nn.LSTM(3, 4, 2),
    "projected": lambda: nn.LSTM(3, 6, proj_size=4),
    "gru": lambda: nn.GRU(3, 4),
    "rnn": lambda: nn.RNN(3, 4),
    "cell": Cell,
}


@pytest.fixture(params=["float64", "no float64"], autouse=True)
def formats(request, monkeypatch):
    """Some devices have no float64."""
    if request.param == "no float64":
        monkeypatch.setattr("adaptive_tbptt._torch.number_formats.NO_FLOAT64", {"mps", "elsewhere"})
        monkeypatch.setattr("tests.elsewhere.NO_FLOAT64", {"mps", "elsewhere"})


def model(name, device):
    torch.manual_seed(0)
    return MODELS[name]().to(device)


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, ROWS, 3, generator=generator)
    return x, torch.roll(x, 2, 0) @ torch.randn(3, 4, generator=generator)


def same(work):
    """Do the work here and elsewhere; the numbers it returns must agree."""
    with torch.backends.mkldnn.flags(enabled=False):
        torch.manual_seed(2)
        here = work(torch.device("cpu"))
    with other_device() as device:
        torch.manual_seed(2)
        there = work(device)
    assert there == pytest.approx(here, rel=1e-5)


def test_the_other_device_refuses_what_a_gpu_refuses():
    with other_device() as device:
        x = torch.ones(2, device=device)
        assert x.device == (x + 1).device == device
        assert (x.cpu() + torch.ones(2)).tolist() == [2.0, 2.0]
        with pytest.raises(RuntimeError, match="two devices"):
            x + torch.ones(2)
        with pytest.raises(RuntimeError, match="numpy"):
            x.numpy()


@pytest.mark.parametrize("name", MODELS)
def test_a_probe_sees_the_same(name):
    def work(device):
        x, y = data()
        placed = x[:40].to(device), y[:40].to(device)
        whole = at.probe(model(name, device), F.mse_loss, *placed)
        held = at.measure.ProbeSettings(held_steps=10)
        parts = at.probe(model(name, device), F.mse_loss, x[:40], y[:40], settings=held)
        return [*whole.measured.ravel(), *parts.measured.ravel()]

    same(work)


@pytest.mark.parametrize("gauge", GAUGES, ids=lambda gauge: type(gauge).__name__)
@pytest.mark.parametrize("name", ["lstm", "cell"])
def test_a_loop_chooses_the_same_k_and_learns_the_same(name, gauge):
    def work(device):
        net = model(name, device)
        resets = torch.zeros(STEPS, ROWS, dtype=torch.bool)
        resets[20, 1] = resets[50, 2] = True
        optimizer = torch.optim.Adam(net.parameters())
        scale = at.StepScale(optimizer, "sqrt")
        control = at.BiasTolerance(0.5, k_max=10, lags=12, gauge=gauge)
        tbptt = at.AdaptiveTBPTT(net, F.mse_loss, control)
        numbers = []
        for window in tbptt.windows(at.SequenceStream(*data(), resets=resets)):
            numbers += [window.k, float(window.backward())]
            scale.step(window)
            optimizer.step()
            optimizer.zero_grad()
        return numbers

    same(work)


@pytest.mark.parametrize("placed", [False, True])
def test_separate_sequences_with_padding_and_static_inputs_train_the_same(placed):
    def work(device):
        net = model("lstm", device)
        x, y = (part.to(device if placed else "cpu") for part in data())
        sequences = [(x[:n, i, :2], y[:n, i], x[0, i, 2:]) for i, n in enumerate((30, 20, 11, 4))]
        stream = at.SequenceStream.from_sequences(sequences, rows=3, shuffle=True)
        tbptt = at.AdaptiveTBPTT(net, F.mse_loss, 4, losses=10)
        numbers = [float(window.backward()) for window in tbptt.windows(stream)]
        return [*numbers, at.evaluate(net, F.mse_loss, stream)]

    same(work)


def test_a_run_goes_on_where_it_stopped(tmp_path):
    def work(device):
        folder = tmp_path / device.type
        for epochs in (1, 2):
            trainer = build(folder, device=device)
            trainer.fit(*streams(), epochs=epochs, resume=True)
        return [float(p.detach().sum()) for p in trainer.model.parameters()]

    same(work)


def test_looking_at_a_model_gives_the_same():
    def work(device):
        net = model("gru", device)
        stream = at.SequenceStream(*data())
        found = at.check_bias(net, F.mse_loss, stream, [1, 3], lags=20, segments=96)
        loop = at.diagnose(net, F.mse_loss, stream, losses=5, lags=20, segments=64, show=False)
        biases = [bias.relative for bias in found] + [row.bias for row in loop.rows[:3]]
        needed = at.lookback(net, F.mse_loss, stream, longest=20, start=torch.ones(1, 1, 4))
        changes = [value for row in needed.rows[:4] for value in (row.change, row.loss)]
        return [at.evaluate(net, F.mse_loss, stream), *biases, *changes]

    same(work)


def test_independent_windows_give_the_same():
    def work(device):
        found = at.lookback(model("lstm", device), F.mse_loss, [data()] * 4)
        return [value for row in found.rows[:4] for value in (row.change, row.loss)]

    same(work)


def test_symbols_are_read_from_the_cpu():
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(6, (200, 64), generator=generator, dtype=torch.uint8)
    control = at.BiasTolerance(
        0.1, k_min=2, k_max=50, lags=50, k_init=10, gauge=at.truncate.ReleaseGauge(tau=0.8)
    )

    def work(device):
        torch.manual_seed(0)
        net = SymbolModel(6, 40, 1).to(device)
        stream = at.SequenceStream(x, x.roll(3, 0))  # bytes, on the CPU
        tbptt = at.AdaptiveTBPTT(net, symbol_loss, control)
        return [float(window.backward()) for window in tbptt.windows(stream)]

    same(work)


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_a_stream_starts_from_a_state_on_either_device(where):
    x, y = data()

    def work(device):
        there = device if where == "device" else torch.device("cpu")
        state = tuple(torch.ones(1, ROWS, 4).to(there) for _ in range(2))
        stream, agent = at.SequenceStream(x, y, state=state, burn_in=3), model("lstm", device)
        tbptt = at.AdaptiveTBPTT(agent, F.mse_loss, 8, losses=20)
        losses = [window.backward().item() for window in tbptt.windows(stream)]
        drawn = stream.random_segment(STEPS - 1, torch.Generator().manual_seed(0))
        mixed = entering(as_recurrent(agent), drawn)  # some rows begin with the stream
        return [*losses, at.evaluate(agent, F.mse_loss, stream), *mixed[0].cpu().ravel().tolist()]

    same(work)
