"""BPTT(K1, K2) against its definition, in float64 to 1e-10, and the promise when K changes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at

from ..oracle import CoreHead, DictState, Scripted, lag_gradients, window_gradient

pytestmark = pytest.mark.usefixtures("double")
T, ROWS, INPUTS, OUT = 6, 2, 3, 2


def flat_mse(outputs, targets):
    return F.mse_loss(outputs, targets.flatten(0, 1))


MODELS = {
    "rnn": lambda: CoreHead(nn.RNN(INPUTS, 4), 4),
    "gru": lambda: CoreHead(nn.GRU(INPUTS, 4), 4),
    "lstm-2": lambda: CoreHead(nn.LSTM(INPUTS, 4, 2), 4),
    "bare-lstm": lambda: nn.LSTM(INPUTS, OUT),
    "dict": lambda: DictState(INPUTS, 4, OUT),
}


def loss_for(name):
    return flat_mse if name == "dict" else F.mse_loss


def data(steps=T, rows=ROWS):
    return torch.randn(steps, rows, INPUTS), torch.randn(steps, rows, OUT)


def gradients(model):
    found = {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in model.named_parameters()
    }
    model.zero_grad()
    return found


def assert_same(ours, theirs):
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_every_style_equals_its_definition(name):
    model, loss_fn = MODELS[name](), loss_for(name)
    x, y = data()
    table = lag_gradients(model, lambda out, s: loss_fn(out, y[s : s + 1]), x)
    stream = at.SequenceStream(x, y)
    # context 0 is (K2, K2), as frameworks do it; otherwise (K + K2, K2), K + 1 and 1 among them.
    for context in range(T):
        for losses in range(1, T + 1):
            tbptt = at.AdaptiveTBPTT(
                model,
                loss_fn,
                at.FixedTruncation(context),
                losses=losses,
            )
            first = 0
            for window in tbptt.windows(stream):
                window.backward()
                assert window.first == first
                assert window.start == max(first - context, 0)
                assert window.stop == min(first + losses, T)
                expected = window_gradient(table, window.start, window.first, window.stop)
                assert_same(gradients(model), expected)
                assert window.reach == (window.first - window.start, window.stop - 1 - window.start)
                first = window.stop
            assert first == T
            assert stream.cursor == 0


@pytest.mark.parametrize("name", MODELS)
def test_k_of_the_whole_stream_is_plain_backward(name):
    model, loss_fn = MODELS[name](), loss_for(name)
    x, y = data()
    (window,) = at.AdaptiveTBPTT(model, loss_fn, at.FixedTruncation(T)).windows(
        at.SequenceStream(x, y)
    )
    loss = window.backward()
    ours = gradients(model)
    by_hand = loss_fn(model(x, None)[0], y)
    by_hand.backward()
    assert_same(ours, gradients(model))
    torch.testing.assert_close(loss, by_hand.detach())
    assert not loss.requires_grad


def train(model, tbptt, stream, epochs=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for window in tbptt.windows(stream):
            window.backward()
            optimizer.step()
            optimizer.zero_grad()
    return dict(model.named_parameters())


@pytest.mark.parametrize("options", [(5, {"overlap": False}), (0, {"losses": 5})])
def test_k_k_is_the_loop_a_person_would_write(options):
    x, y = data(23)
    model = MODELS["lstm-2"]()
    twin = MODELS["lstm-2"]()
    twin.load_state_dict(model.state_dict())
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, at.FixedTruncation(options[0]), **options[1])
    ours = train(model, tbptt, at.SequenceStream(x, y))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        state = None
        for a in range(0, 23, 5):
            out, state = twin(x[a : a + 5], state)
            F.mse_loss(out, y[a : a + 5]).backward()
            optimizer.step()
            optimizer.zero_grad()
            state = tuple(s.detach() for s in state)
    assert_same(ours, dict(twin.named_parameters()))


def test_two_k_k_is_the_loop_a_careful_person_would_write():
    x, y = data(23)
    model = MODELS["lstm-2"]()
    twin = MODELS["lstm-2"]()
    twin.load_state_dict(model.state_dict())
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, at.FixedTruncation(5))
    stream = at.SequenceStream(x, y)
    assert list(tbptt.windows(stream))  # nothing is run, but what is assumed was looked at
    model.head_calls = 0
    ours = train(model, tbptt, stream)
    assert model.head_calls == 2 * 5
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        state = None
        for a in range(0, 23, 5):
            middle = None
            if a:
                _, state = twin.core(x[a - 5 : a], state)
                middle = tuple(s.detach() for s in state)
            out, _ = twin(x[a : a + 5], state)
            F.mse_loss(out, y[a : a + 5]).backward()
            optimizer.step()
            optimizer.zero_grad()
            state = middle
    assert_same(ours, dict(twin.named_parameters()))


@pytest.mark.parametrize(
    "options", [{"losses_per_k": 1.0}, {"losses_per_k": 0.5}, {"losses_per_k": 2.0}, {"losses": 3}]
)
@pytest.mark.parametrize("ks", [[2, 20], [20, 2], [2, 5, 1, 17, 3, 20, 2]])
def test_a_change_of_k_keeps_the_promise(ks, options):
    # No updates here, so the state entering any window must be that of one uninterrupted run, and
    # its gradient that of the definition.
    steps = 60
    x, y = data(steps)
    model = MODELS["gru"]()
    states = [None]
    for t in range(steps):
        states.append(model(x[t : t + 1], states[-1])[1].detach())
    tbptt = at.AdaptiveTBPTT(
        model, F.mse_loss, Scripted(ks), estimate_every=9, burn_in=1, **options
    )
    carried = torch.zeros(steps, dtype=torch.long)
    seen = set()
    for window in tbptt.windows(at.SequenceStream(x, y)):
        window.backward()
        ours = gradients(model)
        out, _ = model(x[window.start : window.stop], states[window.start])
        F.mse_loss(out[window.first - window.start :], y[window.first : window.stop]).backward()
        assert_same(ours, gradients(model))
        carried[window.first : window.stop] += 1
        assert window.start == max(window.first - window.k, 0)
        seen.add(window.k)
    assert (carried == 1).all()
    assert seen >= set(ks[:3])


def test_the_past_that_is_kept_is_bounded():
    x, y = data(500)
    model = MODELS["rnn"]()
    tbptt = at.AdaptiveTBPTT(
        model, F.mse_loss, Scripted([2, 20, 2]), estimate_every=100, burn_in=1, losses=2
    )
    for window in tbptt.windows(at.SequenceStream(x, y)):
        window.backward()
        assert window.stop - tbptt._carried.oldest <= 20 + 20 + 2
        assert len(tbptt._carried._states) <= 20 + 3


def test_a_reset_equals_training_the_rows_as_separate_sequences():
    x, y = data(12, 2)
    resets = torch.zeros(12, 2, dtype=torch.bool)
    resets[0] = True
    resets[5, 0] = resets[8, 1] = True
    model = MODELS["lstm-2"]()
    stream = at.SequenceStream(x, y, resets)
    (window,) = at.AdaptiveTBPTT(model, F.mse_loss, at.FixedTruncation(12)).windows(stream)
    window.backward()
    ours = gradients(model)
    for row, a, b in ((0, 0, 5), (0, 5, 12), (1, 0, 8), (1, 8, 12)):
        part = slice(a, b), slice(row, row + 1)
        (F.mse_loss(model(x[part], None)[0], y[part]) * (b - a) / 24).backward()
    assert_same(ours, gradients(model))


def test_a_reset_inside_short_windows_cuts_state_and_gradient():
    x, y = data(12, 2)
    resets = torch.zeros(12, 2, dtype=torch.bool)
    resets[5, 0] = resets[8, 1] = True
    model = MODELS["gru"]()
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, at.FixedTruncation(3))
    for window in tbptt.windows(at.SequenceStream(x, y, resets)):
        window.backward()
        ours = gradients(model)
        steps = window.stop - window.first
        for row, cut in ((0, 5), (1, 8)):
            for s in range(window.first, window.stop):
                begin = cut if s >= cut else 0  # the sequence this loss belongs to
                a = max(window.start, begin)
                with torch.no_grad():
                    state = model(x[begin:a, row : row + 1], None)[1] if a > begin else None
                out, _ = model(x[a : s + 1, row : row + 1], state)
                (F.mse_loss(out[-1:], y[s : s + 1, row : row + 1]) / (2 * steps)).backward()
        assert_same(ours, gradients(model))


def test_a_learned_initial_state_gets_its_gradient_at_every_start():
    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.h0 = nn.RNN(INPUTS, OUT), nn.Parameter(torch.randn(OUT))

        def initial_state(self, rows):
            return self.h0.expand(1, rows, OUT).contiguous()

        def forward(self, x, state):
            return self.rnn(x, self.initial_state(x.shape[1]) if state is None else state)

    x, y = data(9, 2)
    resets = torch.zeros(9, 2, dtype=torch.bool)
    resets[5, 1] = True
    model = Learned()
    stream = at.SequenceStream(x, y, resets)
    (window,) = at.AdaptiveTBPTT(model, F.mse_loss, at.FixedTruncation(9)).windows(stream)
    window.backward()
    ours = gradients(model)
    for row, a, b in ((0, 0, 9), (1, 0, 5), (1, 5, 9)):
        part = slice(a, b), slice(row, row + 1)
        (F.mse_loss(model(x[part], None)[0], y[part]) * (b - a) / 18).backward()
    assert_same(ours, gradients(model))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.out = nn.GRU(INPUTS, 4), nn.Linear(4, 5)

    def forward(self, x, state):
        h, state = self.gru(x, state)
        return self.out(h).flatten(0, 1), state


class Masked(nn.CrossEntropyLoss):
    def forward(self, logits, targets):
        return super().forward(logits, targets.flatten())


def test_ignored_targets_are_weighted_right():
    x, y = torch.randn(20, 3, INPUTS), torch.randint(5, (20, 3))
    y[torch.rand(20, 3) < 0.4] = -100
    y[4:8] = -100
    resets = torch.zeros(20, 3, dtype=torch.bool)
    resets[9, 1] = True
    model, loss_fn = Tagger(), Masked()
    stream = at.SequenceStream(x, y, resets)
    tbptt = at.AdaptiveTBPTT(model, loss_fn, at.FixedTruncation(4))
    total, weight = 0.0, 0.0
    for window in tbptt.windows(stream):
        loss = window.backward()
        here = y[window.first : window.stop]
        assert window.weight == (here != -100).sum()
        total, weight = total + loss * window.weight, weight + window.weight
        grads = gradients(model)
        if window.first == 4:  # nothing but masked targets: no loss, no gradient, no NaN
            assert loss == 0
            assert all((g == 0).all() for g in grads.values())
    whole = at.evaluate(model, loss_fn, stream)
    assert total / weight == pytest.approx(whole)
    # A mask of one's own, in the targets, with count_losses= to count it.
    mask = y != -100
    pair = at.SequenceStream(x, {"y": y.clamp_min(0), "mask": mask}, resets)

    def masked(logits, targets):
        each = F.cross_entropy(logits, targets["y"].flatten(), reduction="none")
        return (each * targets["mask"].flatten()).sum() / targets["mask"].sum()

    count_losses = lambda targets: float(targets["mask"].sum())  # noqa: E731
    assert at.evaluate(model, masked, pair, count_losses=count_losses, chunk=7) == pytest.approx(
        whole
    )
    other = at.AdaptiveTBPTT(model, masked, at.FixedTruncation(20), count_losses=count_losses)
    (window,) = other.windows(pair)
    assert window.backward() == pytest.approx(whole)


def test_accumulating_windows_adds_their_gradients():
    x, y = data(12)
    model = MODELS["gru"]()
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, at.FixedTruncation(3))
    for window in tbptt.windows(at.SequenceStream(x, y)):
        window.backward(scale=1 / 4)
    together = gradients(model)
    total = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for window in tbptt.windows(at.SequenceStream(x, y)):
        window.loss().backward()
        for n, g in gradients(model).items():
            total[n] += g / 4
    assert_same(together, total)


class InPlace(nn.Module):
    """A recurrence that writes into its state, as one may where nobody else holds it."""

    def __init__(self, writes):
        super().__init__()
        torch.manual_seed(0)
        self.affine, self.writes = nn.Linear(3, 4), writes

    def forward(self, x, state):
        h = x.new_zeros(x.shape[1], 4) if state is None else state
        outputs = []
        for step in self.affine(x):
            h = h.mul_(0.9).add_(step) if self.writes else 0.9 * h + step
            outputs.append(h.clone())
        return torch.stack(outputs), h


def test_a_model_may_write_into_its_state():
    x, y = torch.randn(40, 2, 3), torch.randn(40, 2, 4)
    found = []
    for writes in (False, True):
        tbptt = at.AdaptiveTBPTT(InPlace(writes), F.mse_loss, at.FixedTruncation(8))
        losses = [w.backward().item() for w in tbptt.windows(at.SequenceStream(x, y))]
        found.append([*losses, *at.probe(InPlace(writes), F.mse_loss, x, y, burn_in=10).mean])
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def test_two_streams_at_a_time_are_refused():
    a, b = (at.SequenceStream(torch.randn(40, 2, 3), torch.zeros(40, 2, 4)) for _ in range(2))
    tbptt = at.AdaptiveTBPTT(nn.GRU(3, 4), F.mse_loss, at.FixedTruncation(10))
    one, other = iter(tbptt.windows(a)), iter(tbptt.windows(b))
    for windows in (one, other):
        next(windows).backward()
    with pytest.raises(ValueError, match="of another stream"):
        next(one)


@pytest.mark.parametrize("make", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_class_weights_weigh_pieces_as_the_loss_weighs_targets(make):
    inner = make(weight=torch.tensor([1.0, 20.0, 0.5]), ignore_index=2)

    class Flat(make):
        def forward(self, out, target):
            return inner(out.flatten(0, 1), target.flatten())

    loss = Flat(weight=inner.weight, ignore_index=2)
    targets = (torch.rand(50, 2) * 3).long()
    stream = at.SequenceStream(torch.randn(50, 2, 3), targets)
    model = nn.GRU(3, 3)
    whole = at.evaluate(model, loss, stream, chunk=50)
    assert at.evaluate(model, loss, stream, chunk=7) == pytest.approx(whole, rel=1e-5)
