"""States that are written in place, kept inside or hidden, and kernels that drop gradients."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at

pytestmark = pytest.mark.usefixtures("double")
STEPS, ROWS, INPUTS, HIDDEN = 40, 3, 2, 4


@dataclasses.dataclass
class Params:
    """A cache in the manner of Mamba's InferenceParams: a step count, and tensors by layer."""

    seqlen_offset: int = 0
    memory: dict = dataclasses.field(default_factory=dict)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.GRUCell(INPUTS, HIDDEN)

    def run(self, x, h):
        seen = []
        for xt in x:
            h = self.cell(xt, h)
            seen.append(h)
        return torch.stack(seen), h


class Plain(Base):
    def forward(self, x, state):
        return self.run(x, x.new_zeros(x.shape[1], HIDDEN) if state is None else state)


class Overwrites(Base):
    """Write the new state into the tensor that was passed in."""

    def forward(self, x, state):
        state = x.new_zeros(x.shape[1], HIDDEN) if state is None else state
        outputs, h = self.run(x, state.clone())
        return outputs, state.copy_(h)


class Cached(Base):
    """Write into a cache object, and return it."""

    def initial_state(self, rows):  # a count that is no tensor does not say where it starts
        return Params(memory={0: (torch.zeros(rows, HIDDEN),)})

    def forward(self, x, state):
        state = self.initial_state(x.shape[1]) if state is None else state
        (h,) = state.memory[0]
        outputs, new = self.run(x, h.clone())
        h.copy_(new)
        state.seqlen_offset += len(x)
        return outputs, state


class OneBuffer(Base):
    """Return the same memory each time, with the next call's state written over it."""

    def forward(self, x, state):
        state = x.new_zeros(x.shape[1], HIDDEN) if state is None else state
        outputs, h = self.run(x, state)
        if not h.requires_grad:
            return outputs, h
        if getattr(self, "memory", None) is None or self.memory.shape != h.shape:
            self.memory = torch.zeros_like(h)
        self.memory = self.memory.detach()  # the same memory, outside the graph before
        return outputs, self.memory.copy_(h)


def train(model, recompute=None):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, ROWS, INPUTS, generator=generator)
    resets = torch.zeros(STEPS, ROWS, dtype=torch.bool)
    resets[13, 1] = True
    stream = at.SequenceStream(x, torch.zeros(STEPS, ROWS, HIDDEN), resets)
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, 5, losses=6, recompute=recompute)
    losses = [window.backward() for window in tbptt.windows(stream)]
    return [*losses, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("make", [Overwrites, Cached, OneBuffer])
@pytest.mark.parametrize("recompute", [None, 2])
def test_a_state_that_is_written_in_place_trains_all_the_same(make, recompute):
    for ours, theirs in zip(train(make(), recompute), train(Plain(), recompute), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("make", [Overwrites, Cached])
def test_a_state_that_is_written_in_place_is_measured_all_the_same(make):
    x, y = torch.randn(STEPS, ROWS, INPUTS), torch.randn(STEPS, ROWS, HIDDEN)
    ours, theirs = (
        at.probe(model, F.mse_loss, x, y).state_norms[1:] for model in (make(), Plain())
    )
    assert ours == pytest.approx(theirs, rel=1e-12)


def findings(model):
    x, y = torch.randn(STEPS, ROWS, INPUTS), torch.randn(STEPS, ROWS, HIDDEN)
    return at.check(model, F.mse_loss, (x, y))


@pytest.mark.parametrize("make", [Plain, Overwrites, Cached])
def test_nothing_is_found_amiss(make):
    assert findings(make()) == []


class Opaque:
    """A cache that the library cannot look into."""

    def __init__(self, h):
        self.layers = [h]


class Hidden(Base):
    def forward(self, x, state):
        state = Opaque(x.new_zeros(x.shape[1], HIDDEN)) if state is None else state
        outputs, state.layers[0] = self.run(x, state.layers[0])
        return outputs, state


def test_tensors_in_an_object_are_refused():
    message = "the state of Hidden holds a Opaque, whose tensors the library cannot detach"
    with pytest.raises(ValueError, match=message):
        train(Hidden())


class Inside(Base):
    """Keep the state in a buffer; what comes in is ignored."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(1, HIDDEN))

    def forward(self, x, state):
        outputs, h = self.run(x, self.kept.expand(x.shape[1], HIDDEN).contiguous())
        self.kept.copy_(h[:1].detach())
        return outputs, h


def test_a_state_kept_inside_is_warned_of():
    model = Inside()
    found = findings(model)
    assert any("it keeps a state of its own inside" in one.message for one in found)
    assert not model.kept.any()  # a check leaves the model as it was


class Kernel(torch.autograd.Function):
    """h_t = 0.5 h_{t-1} + x_t over all steps, with the gradients a kernel may drop."""

    @staticmethod
    def forward(ctx, x, h0, drops):
        ctx.drops, seen, h = drops, [], h0
        for xt in x:
            h = 0.5 * h + xt
            seen.append(h)
        return torch.stack(seen), h.clone()

    @staticmethod
    def backward(ctx, outputs, last):
        carried = torch.zeros_like(last) if ctx.drops == "dht" else last
        found = []
        for gradient in outputs.flip(0):
            carried = carried + gradient
            found.append(carried)
            carried = 0.5 * carried
        first = {"dh0": None, "zeros": torch.zeros_like(carried)}.get(ctx.drops, carried)
        return torch.stack(found[::-1]), first, None


class Fused(nn.Module):
    def __init__(self, drops):
        super().__init__()
        self.enter, self.drops = nn.Linear(INPUTS, HIDDEN), drops

    def forward(self, x, state):
        state = x.new_zeros(x.shape[1], HIDDEN) if state is None else state
        return Kernel.apply(self.enter(x), state, self.drops)


SAYS = {
    "dh0": "must return the gradient of its initial state .dh0.",
    "zeros": "must return the gradient of its initial state .dh0.",
    "dht": "must take the gradient of its last state",
}


@pytest.mark.parametrize("drops", SAYS)
def test_a_kernel_that_drops_the_gradient_of_the_state_is_warned_of_once(drops):
    model = Fused(drops)
    with pytest.warns(UserWarning, match=SAYS[drops]) as caught:
        dropped = train(model)
    assert len(caught) == 1
    # It matters: the gradient is that of a loop without any context.
    whole = Fused("nothing")
    whole.load_state_dict(model.state_dict())
    assert not torch.allclose(train(whole)[-2], dropped[-2], rtol=1e-3)


class Delay(Base):
    """Carries its last inputs, which depend on no parameter: they have no gradient to pass on."""

    def forward(self, x, state):
        past, h = state or (x.new_zeros(2, *x.shape[1:]), x.new_zeros(x.shape[1], HIDDEN))
        seen = torch.cat([past, x])
        outputs, h = self.run(seen[2:] + seen[1:-1] + seen[:-2], h)
        return outputs, (seen[-2:], h)


class Partly(Plain):
    """Detaches its state on purpose every other time: a gradient is left."""

    def forward(self, x, state):
        outputs, h = super().forward(x, state)
        return outputs, 0.5 * h + 0.5 * h.detach()


class Statistic(Base):
    """Carries a number for a person to look at, without a gradient."""

    def forward(self, x, state):
        size, h = state or (x.new_zeros(x.shape[1], 1), x.new_zeros(x.shape[1], HIDDEN))
        outputs, h = self.run(x, h)
        return outputs, (0.9 * size.detach() + h.detach().norm(dim=1, keepdim=True), h)


@pytest.mark.parametrize("make", [Delay, Partly, Statistic, lambda: Fused("nothing")])
def test_there_is_no_false_alarm(make):
    x = torch.randn(STEPS, ROWS, INPUTS)
    assert at.check(make(), F.mse_loss, (x, torch.zeros(STEPS, ROWS, HIDDEN))) == []


def test_a_detached_state_is_named():
    class Detached(Plain):
        def forward(self, x, state):
            outputs, h = super().forward(x, state)
            return outputs, h.detach()

    (found,) = findings(Detached())
    assert "no gradient flows back through the state that Detached returns" in found.message


class Layers(nn.Module):
    """An LSTM of two layers whose state loses the gradient of c in the upper one."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(INPUTS, HIDDEN, 2)

    def forward(self, x, state):
        if state is not None:
            h, c = state
            state = h, torch.stack([c[0], c[1].detach()])
        return self.lstm(x, state)


PAPER = at.BiasTolerance(0.3, k_max=5, lags=5, gauge=at.truncate.PaperGauge())


def test_a_loop_and_its_estimates_warn_of_one_layer_once():
    x, y = torch.randn(STEPS, ROWS, INPUTS), torch.randn(STEPS, ROWS, HIDDEN)
    tbptt = at.AdaptiveTBPTT(Layers(), F.mse_loss, PAPER, burn_in=2)
    with pytest.warns(UserWarning, match=r"c\[1\]") as caught:
        next(iter(tbptt.windows(at.SequenceStream(x, y)))).backward()
    (warning,) = [one for one in caught if one.category is UserWarning]
    assert "no gradient reaches 'c[1]' of the state" in str(warning.message)
    assert warning.filename == __file__
    with pytest.warns(UserWarning, match=r"no gradient reaches 'c\[1\]'"):
        at.probe(Layers(), F.mse_loss, x, y)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("model", [lambda: nn.LSTM(INPUTS, HIDDEN), Layers])
def test_predictions_need_no_gradient(model, mode):
    stream = at.SequenceStream(torch.randn(STEPS, ROWS, INPUTS), torch.randn(STEPS, ROWS, HIDDEN))
    with mode():  # warnings are errors here
        at.evaluate(model(), F.mse_loss, stream)
        at.lookback(model(), F.mse_loss, stream, longest=4)
