"""A module that takes inputs alone: its state goes in and comes out, by name."""

import pytest
import torch
from torch import nn

import adaptive_tbptt as at

STEPS, ROWS = 90, 4


class Plain(nn.Module):
    """Two layers without a state of their own; the first is called by keyword."""

    def __init__(self, head=None):
        super().__init__()
        self.lstm, self.gru = nn.LSTM(3, 5), nn.GRU(5, 2)
        self.head = head

    def forward(self, inputs):
        features, _ = self.lstm(input=inputs)
        return {"y": self.gru(features)[0]}


class Kept(nn.Module):
    """Keeps its state in an attribute of a submodule."""

    def __init__(self):
        super().__init__()
        self.block = nn.Module()
        self.block.rnn, self.block.hidden = nn.GRU(3, 2), None

    def forward(self, inputs):
        outputs, self.block.hidden = self.block.rnn(inputs, self.block.hidden)
        return {"y": outputs}


class Layer(nn.Module):
    """A layer that is not torch's, batch first, which returns its state only if asked."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 2, batch_first=True)

    def forward(self, x, before=None, also_state=False):
        outputs, after = self.gru(x, before)
        return (outputs, after) if also_state else outputs


class Own(nn.Module):
    """Starts its layer from zeros that it makes itself."""

    batch_first = True

    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def forward(self, inputs):
        zeros = torch.zeros(1, len(inputs), 2, dtype=inputs.dtype)
        return {"y": self.layer(inputs, zeros, also_state=True)[0]}


def loss_fn(outputs, targets):
    return nn.functional.mse_loss(outputs["y"], targets)


CASES = {
    "layers": (Plain, ["lstm", "gru"], False),
    "attribute": (Kept, "block.hidden", False),
    "own layer": (Own, "layer", True),
}


@pytest.mark.parametrize("recompute", [None, 10])
@pytest.mark.parametrize("case", CASES)
def test_a_window_has_the_gradient_of_full_backpropagation_over_it(case, recompute):
    kind, names, batch_first = CASES[case]
    torch.manual_seed(0)
    module = kind().double()
    x, y = torch.randn(STEPS, ROWS, 3).double(), torch.randn(STEPS, ROWS, 2).double()
    model = at.model.as_recurrent(module, state_in=names)
    stream = at.SequenceStream(x, y)
    # The context of the second window reaches back to the start: it is BPTT over both windows.
    tbptt = at.AdaptiveTBPTT(model, loss_fn, 45, losses=45, recompute=recompute)
    for window in tbptt.windows(stream):
        module.zero_grad()
        window.backward()
    ours = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    outputs = module(x.transpose(0, 1) if batch_first else x)["y"]
    outputs = outputs.transpose(0, 1) if batch_first else outputs
    nn.functional.mse_loss(outputs[45:], y[45:]).backward()
    for mine, p in zip(ours, module.parameters(), strict=True):
        torch.testing.assert_close(mine, p.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("case", CASES)
def test_resets_and_measurements_see_the_state(case):
    kind, names, batch_first = CASES[case]
    torch.manual_seed(0)
    module = kind()
    x, y = torch.randn(300, ROWS, 3), torch.randn(300, ROWS, 2)
    model = at.model.as_recurrent(module, state_in=names)
    resets = torch.zeros(300, ROWS, dtype=torch.bool)
    resets[7, 1] = True
    (piece, rest) = (at.SequenceStream(x, y, resets).segment(0, 20) for _ in range(2))
    state = at.model.advance(model, piece, None)
    alone = at.model.advance(model, rest.between(7, 20)._replace(resets=None), None)
    for leaf, other in zip(at.data.nest.leaves(state), at.data.nest.leaves(alone), strict=True):
        assert torch.allclose(leaf[:, 1], other[:, 1], atol=1e-6)
        assert not torch.allclose(leaf[:, 0], other[:, 0], atol=1e-6)
    assert (
        at.check(model, loss_fn, (x.transpose(0, 1), y.transpose(0, 1)) if batch_first else (x, y))
        == []
    )


def test_the_module_stays_as_it_was():
    module, kept = Plain(), Kept()
    x = torch.randn(6, ROWS, 3)
    at.model.as_recurrent(module, state_in=["lstm", "gru"]).core(x, None)
    assert not module.lstm._forward_hooks
    assert not module.lstm._forward_pre_hooks
    kept(x)
    mine = kept.block.hidden
    at.model.as_recurrent(kept, state_in="block.hidden").core(x, None)
    assert kept.block.hidden is mine
    with pytest.raises(RuntimeError):
        at.model.as_recurrent(kept, state_in="block.hidden").core(torch.randn(6, ROWS, 9), mine)
    assert kept.block.hidden is mine


class Twice(Plain):
    def forward(self, inputs):
        self.lstm(inputs)
        return super().forward(inputs)


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.both = nn.GRUCell(3, 2), nn.GRU(3, 2, bidirectional=True)
        self.linear = nn.Linear(3, 2)

    def forward(self, inputs):
        return self.linear(inputs)


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        (Plain(), "rnn", "no layer or attribute 'rnn' to hold its state.*lstm, gru"),
        (Plain(), [], "at least one"),
        (Cells(), "cell", "once for every step"),
        (Cells(), "both", "reads the future"),
        (Cells(), "linear", "must return .outputs, state."),
        (Cells(), "training.x", "no layer or attribute"),
        (Twice(), "lstm", "ran 2 times"),
        (Kept(), "block.rnn", "keeps the state of a layer in 'block.hidden': pass state_in="),
    ],
)
def test_a_name_that_holds_no_state_is_refused(module, name, message):
    with pytest.raises(ValueError, match=message):
        at.model.as_recurrent(module, state_in=name).core(torch.randn(6, ROWS, 3), None)


def test_a_compiled_module_is_refused():
    compiled = Plain()
    compiled._orig_mod = Plain()  # as torch.compile returns it
    with pytest.raises(ValueError, match=r"before torch.compile"):
        at.model.as_recurrent(compiled, state_in="lstm")


def test_a_module_without_a_state_is_told_of_it():
    x, y = torch.randn(200, ROWS, 3), torch.randn(200, ROWS, 2)
    with pytest.raises(TypeError, match=r"takes inputs alone.*state_in=\['lstm', 'gru'\]"):
        at.diagnose(Plain(), loss_fn, (x, y), losses=10)


def test_a_run_goes_on_from_saved_states():
    torch.manual_seed(0)
    module = Plain()
    x, y = torch.randn(80, ROWS, 3), torch.randn(80, ROWS, 2)

    def begin():
        model = at.model.as_recurrent(module, state_in=["lstm", "gru"])
        return at.AdaptiveTBPTT(model, loss_fn, 8, losses=20), at.SequenceStream(x, y)

    tbptt, stream = begin()
    losses = [float(window.backward()) for window in tbptt.windows(stream)]
    tbptt, stream = begin()
    for window in tbptt.windows(stream):
        window.backward()
        if window.stop == 40:
            break
    resumed, rest = begin()
    resumed.load_state_dict(tbptt.state_dict())
    rest.load_state_dict(stream.state_dict())
    assert [float(window.backward()) for window in resumed.windows(rest)] == losses[2:]


def test_a_wrapped_model_is_not_wrapped_again():
    model = at.model.as_recurrent(Kept(), state_in="block.hidden")
    assert at.model.as_recurrent(model) is model
    with pytest.raises(ValueError, match="wrapped already"):
        at.model.as_recurrent(model, state_in="block.rnn")
