"""Autocast and GradScaler: norms unscaled and close to float32's, training as torch advises."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at

from ..oracle import CoreHead, Scripted

STEPS, ROWS, INPUTS, HIDDEN = 24, 4, 3, 16
BF16 = torch.bfloat16


def autocast(dtype=BF16):
    return torch.autocast("cpu", dtype)


class Elman(nn.Module):
    """Its state leaves every step in the format of autocast, and enters the first in float32."""

    def __init__(self, decay=None):
        super().__init__()
        self.linear = nn.Linear(INPUTS + HIDDEN, HIDDEN)
        self.readout = nn.Linear(HIDDEN, HIDDEN)
        self.decay = decay
        if decay is not None:
            self.linear.weight.data[:, INPUTS:] = decay * torch.eye(HIDDEN)

    def core(self, x, state):
        h = x.new_zeros(x.shape[1], HIDDEN) if state is None else state
        seen = []
        for xt in x:
            h = self.linear(torch.cat([xt, h.to(xt.dtype)], -1))
            h = torch.tanh(h) if self.decay is None else h
            seen.append(h)
        return torch.stack(seen), h

    def head(self, features):
        return self.readout(features)

    def forward(self, x, state):
        features, state = self.core(x, state)
        return self.head(features), state


MODELS = {
    "elman": Elman,
    "gru": lambda: nn.GRU(INPUTS, HIDDEN),
    "gru-2": lambda: CoreHead(nn.GRU(INPUTS, HIDDEN, 2), HIDDEN, HIDDEN),
    "rnn": lambda: nn.RNN(INPUTS, HIDDEN),
    "lstm-cell": lambda: nn.LSTMCell(INPUTS, HIDDEN),
    "gru-cell": lambda: nn.GRUCell(INPUTS, HIDDEN),
}


def data(steps=STEPS):
    return torch.randn(steps, ROWS, INPUTS), torch.randn(steps, ROWS, HIDDEN)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("burn_in", [0, 4])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_the_norms_under_autocast_are_those_of_float32_up_to_rounding(name, burn_in, dtype):
    model, (x, y) = MODELS[name](), data()
    plain = at.probe(model, F.mse_loss, x, y, burn_in=burn_in)
    with autocast(dtype):
        cast = at.probe(model, F.mse_loss, x, y, burn_in=burn_in)
    assert cast.state_norms.dtype == np.float64
    assert not np.allclose(cast.mean, plain.mean, rtol=1e-6)  # autocast did something
    tolerance = 32 * torch.finfo(dtype).eps
    np.testing.assert_allclose(cast.mean, plain.mean, rtol=tolerance)
    np.testing.assert_allclose(cast.cumulative_norms, plain.cumulative_norms, rtol=tolerance)
    assert list(cast.component_norms) == list(plain.component_norms)


def test_the_floor_is_that_of_the_format_the_gradients_came_through():
    model, (x, y) = nn.GRU(INPUTS, HIDDEN), data()
    with autocast(BF16):
        # float32's is the higher one of the two.
        assert at.probe(model, F.mse_loss, x, y).floor == 2.0**-126 * 2**23
    with autocast(torch.float16):
        low = at.probe(model, F.mse_loss, x, y).floor
    assert 2.0**-29 <= low < 2.0**-14
    assert np.log2(low) == int(np.log2(low))


def test_float16_resolves_norms_far_below_its_smallest_number():
    model, (x, y) = Elman(decay=0.5), data(steps=30)
    plain = at.probe(model, F.mse_loss, x, y)
    with autocast(torch.float16):
        cast = at.probe(model, F.mse_loss, x, y)
    seen = plain.mean > 10 * cast.floor
    assert plain.mean[seen].min() < 2.0**-16  # float16 is denormal from 2^-14 on
    np.testing.assert_allclose(cast.mean[seen], plain.mean[seen], rtol=0.02)
    fit = at.truncate.PaperGauge().fit(cast)
    assert fit.beta == pytest.approx(0.5, rel=0.02)


def test_long_windows_of_a_state_that_changes_its_format():
    model, (x, y), formats = Elman(), data(), []
    core = model.core
    model.core = lambda x, state: (formats.append(state), core(x, state))[1]
    with autocast():
        whole = at.probe(model, F.mse_loss, x, y, state=torch.zeros(ROWS, HIDDEN))
        formats.clear()
        pieces = at.probe(
            model, F.mse_loss, x, y, state=torch.zeros(ROWS, HIDDEN),
            settings=at.measure.ProbeSettings(held_steps=5),
        )  # fmt: skip
    float32 = [s for s in formats if s is not None and s.dtype == torch.float32]
    assert len(float32) == 2  # the first step, run forward and once more on the way back
    np.testing.assert_allclose(pieces.state_norms, whole.state_norms, rtol=1e-6)


def train(model, stream, block, epochs=2):
    """Own loop with K = 3, 9, 5, 2; `block` is where the autocast block ends."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tbptt = at.AdaptiveTBPTT(
        model, F.mse_loss, Scripted([3, 9, 5, 2]), estimate_every=20, burn_in=2
    )
    scale = at.StepScale(optimizer)
    formats = set()

    def update(window):
        assert all(p.grad is not None and p.grad.any() for p in model.parameters())
        scale.step(window)
        optimizer.step()
        optimizer.zero_grad()
        formats.update(s.dtype for s in tbptt._carried._states.values() if s is not None)

    for _ in range(epochs):
        if block == "loop":
            with autocast():
                for window in tbptt.windows(stream):
                    window.backward()
                    update(window)
            continue
        for window in tbptt.windows(stream):
            with autocast():
                loss = window.backward() if block == "backward" else window.loss()
            if block == "loss":
                loss.backward()
            update(window)
    return [p.detach().clone() for p in model.parameters()], formats


@pytest.mark.parametrize("name", ["elman", "gru"])
@pytest.mark.parametrize("resets", [False, True])
def test_it_does_not_matter_where_the_autocast_block_ends(name, resets):
    # Around the whole loop autocast would keep the weights of the first window in bfloat16.
    x, y = data(60)
    starts = torch.zeros(60, ROWS, dtype=torch.bool)
    starts[17, 1] = starts[40, 2] = True
    results = []
    for block in ("loss", "backward", "loop"):
        torch.manual_seed(1)
        model, stream = MODELS[name](), at.SequenceStream(x, y, starts if resets else None)
        if name == "gru":
            model = CoreHead(model, HIDDEN, HIDDEN)
        results.append(train(model, stream, block))
    for parameters, formats in results:
        assert formats == results[0][1]
        assert len(formats) == 1  # carried states are all of one format
        for ours, theirs in zip(parameters, results[0][0], strict=True):
            assert torch.equal(ours, theirs)


def test_a_bfloat16_state_stays_one_where_a_row_starts_anew():
    x, y = data(20)
    starts = torch.zeros(20, ROWS, dtype=torch.bool)
    starts[7, 1] = True
    model, seen = Elman(), []
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, at.FixedTruncation(5))
    tbptt.recurrent.dims(x)  # known before autocast: the initial state is float32
    stream = at.SequenceStream(x, y, starts)
    assert list(tbptt.windows(stream))  # looked at once here: those would be calls of their own
    core = model.core
    model.core = lambda x, state: (seen.append(state), core(x, state))[1]
    with autocast():
        for window in tbptt.windows(stream):
            window.backward()
    formats = [None if s is None else s.dtype for s in seen]
    # The first two windows start where the stream does: from None, and from the zeros it is for.
    assert formats[:2] == [None, torch.float32]
    assert set(formats[2:]) == {BF16}


class ExactReadout(Elman):
    """Its readout is kept out of autocast, forward and so backward."""

    def head(self, features):
        with torch.autocast("cpu", enabled=False):
            return self.readout(features.float())


def test_a_window_trains_as_the_loop_that_torch_advises():
    x, y = data(20)
    model = ExactReadout()
    (window,) = at.AdaptiveTBPTT(model, F.mse_loss, at.FixedTruncation(20)).windows(
        at.SequenceStream(x, y)
    )
    with autocast():
        window.backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with autocast():
        loss = F.mse_loss(model(x, None)[0], y)
    loss.backward()
    for mine, p in zip(ours, model.parameters(), strict=True):
        assert torch.equal(mine, p.grad)


def test_a_scaler_scales_the_gradient_and_not_the_loss():
    x, y = data(20)
    grads, losses = [], []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        torch.manual_seed(1)
        model = Elman()
        (window,) = at.AdaptiveTBPTT(model, F.mse_loss, at.FixedTruncation(20)).windows(
            at.SequenceStream(x, y)
        )
        with autocast():
            losses.append(window.backward(scale=0.5, scaler=scaler))
        grads.append([p.grad for p in model.parameters()])
    with autocast():
        expected = F.mse_loss(model(x, None)[0], y).detach()
    assert torch.equal(losses[0], expected)
    assert torch.equal(losses[1], expected)
    for one, scaled in zip(*grads, strict=True):
        torch.testing.assert_close(scaled, 1024 * one, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_leaves_everything_as_it_was(fused):
    x, y = data(40)
    model = Elman()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scale, clip = at.StepScale(optimizer), at.loop.Clip(1e6)
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, at.FixedTruncation(4))
    for i, window in enumerate(tbptt.windows(at.SequenceStream(x, y))):
        before = [p.detach().clone() for p in model.parameters()]
        with autocast():
            window.backward(scaler=scaler)
        overflow = i % 3 == 1
        if overflow:
            next(model.parameters()).grad[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        clip(model.parameters(), window.losses)
        grads = [p.grad.clone() for p in model.parameters()]
        scale.step(window)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert optimizer.param_groups[0]["lr"] == 0.1
        for p, old, g in zip(model.parameters(), before, grads, strict=True):
            # lr * sqrt(K) = 0.2
            torch.testing.assert_close(p.detach(), old if overflow else old - 0.2 * g)
    assert scaler.get_scale() == 1024.0 / 2**3


def test_the_trainer_runs_under_autocast():
    x, y = data(200)
    model = CoreHead(nn.GRU(INPUTS, HIDDEN), HIDDEN, HIDDEN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    control = at.BiasTolerance(delta=0.5, k_max=20, lags=30, gauge=at.truncate.PaperGauge())
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, control)
    trainer = at.Trainer(tbptt, optimizer, show=False)
    stream = at.SequenceStream(x, y)
    with autocast():
        before = trainer.evaluate(stream)
        result = trainer.fit(stream, stream, epochs=2)
    assert result.best_loss < before
    assert at.evaluate(model, F.mse_loss, stream) == pytest.approx(result.best_loss, rel=0.01)
    assert at.evaluate(model, F.mse_loss, stream) != result.best_loss


def onednn_has_a_bfloat16_lstm():
    try:
        with autocast():
            nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
    except RuntimeError:
        return False
    return True


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
def test_an_lstm_that_onednn_refuses_is_explained_and_runs_without_it():
    model, (x, y) = nn.LSTM(INPUTS, HIDDEN), data()
    plain = at.probe(model, F.mse_loss, x, y)
    if not onednn_has_a_bfloat16_lstm():
        with autocast(), pytest.raises(RuntimeError, match=r"mkldnn\.flags\(enabled=False\)"):
            at.probe(model, F.mse_loss, x, y)
    with autocast(), torch.backends.mkldnn.flags(enabled=False):
        cast = at.probe(model, F.mse_loss, x, y)
    np.testing.assert_allclose(cast.mean, plain.mean, rtol=0.25)


class Halves(nn.Module):
    """A recurrence in a narrow format, and a head in one of its own."""

    def __init__(self, hidden, narrow, head):
        super().__init__()
        self.into, self.cell = (
            nn.Linear(8, hidden, dtype=narrow),
            nn.Linear(hidden, hidden, dtype=narrow),
        )
        self.out = nn.Linear(hidden, hidden, dtype=head)

    def core(self, x, state):
        state = x.new_zeros(x.shape[1], self.cell.in_features) if state is None else state
        features = []
        for step in x:
            state = torch.tanh(self.into(step) + self.cell(state))
            features.append(state)
        return torch.stack(features), state

    def head(self, features):
        return self.out(features.to(self.out.weight.dtype))

    def forward(self, x, state):
        features, state = self.core(x, state)
        return self.head(features), state


@pytest.mark.parametrize(
    ("narrow", "head"),
    [
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_levels_of_narrow_formats_are_those_of_wide_ones(narrow, head):
    torch.manual_seed(0)
    model = Halves(256, narrow, head)
    x, y = 3 * torch.randn(8, 64, 8), 3 * torch.randn(8, 64, 256)
    contexts = (0, 1, 2, 4)

    def small(out, target):  # its gradient is below the smallest number of float16
        return 0.01 * F.mse_loss(out, target)

    def levels(x, y):
        objective = at.model.Objective.of(model, small)
        state = objective.recurrent.initial_state(x)
        parameters = list(model.parameters())
        found = at.measure.level_gradients(
            objective, at.data.Segment(x, y), state, contexts, parameters
        )
        assert found.reached
        return [
            torch.cat([torch.zeros(p.numel()) if g is None else g.float().flatten()
                       for g, p in zip(level, parameters, strict=True)])
            for level in found.gradients
        ]  # fmt: skip

    there = levels(x.to(narrow), y.to(head))
    model.float()
    here = levels(x, y)
    for ours, theirs in zip(there, here, strict=True):
        assert theirs.norm() > 0
        assert (ours - theirs).norm() < 0.1 * theirs.norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", [*MODELS, "lstm"])
def test_float16_on_a_gpu(name):
    model = (nn.LSTM(INPUTS, HIDDEN) if name == "lstm" else MODELS[name]()).cuda()
    x, y = data(100)
    plain = at.probe(model, F.mse_loss, x[:STEPS], y[:STEPS])
    with torch.autocast("cuda", torch.float16):
        cast = at.probe(model, F.mse_loss, x[:STEPS], y[:STEPS])
    np.testing.assert_allclose(cast.mean, plain.mean, rtol=0.05)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, at.FixedTruncation(5))
    for window in tbptt.windows(at.SequenceStream(x, y)):
        with torch.autocast("cuda", torch.float16):
            assert torch.isfinite(window.backward(scaler=scaler))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
