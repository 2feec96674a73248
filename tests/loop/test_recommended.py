"""The recommended loop: `AdaptiveTBPTT(model, loss_fn)`."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at
from adaptive_tbptt.loop.estimates import Estimate
from adaptive_tbptt.loop.schedule import SoFar, count_confirmed, steps_between
from adaptive_tbptt.truncate import BestGuess


class Recall(nn.Module):
    """An LSTM that reads out what it saw."""

    def __init__(self, units=16):
        super().__init__()
        self.core = nn.LSTM(1, units)
        self.head = nn.Linear(units, 1)

    def forward(self, x, state=None):
        hidden, state = self.core(x, state)
        return self.head(hidden), state


def delayed(steps, rows, lag, generator):
    x = torch.randn(steps, rows, 1, generator=generator)
    return at.SequenceStream(x, torch.roll(x, lag, 0))


def train(tbptt, stream, epochs, optimizer):
    for _ in range(epochs):
        for window in tbptt.windows(stream):
            window.backward()
            optimizer.step()
            optimizer.zero_grad()


def test_nothing_but_model_and_loss_is_needed():
    tbptt = at.AdaptiveTBPTT(nn.GRU(2, 2), F.mse_loss)
    assert tbptt.controller == BestGuess(delta=0.2, k_max=80)
    assert (tbptt.losses, tbptt.losses_per_k, tbptt.overlap) == (20, 2.0, False)
    assert (tbptt.long_windows, tbptt.k) == (160, 0)
    assert at.AdaptiveTBPTT(nn.GRU(2, 2), F.mse_loss, overlap=True).overlap
    assert at.AdaptiveTBPTT(nn.GRU(2, 2), F.mse_loss, 35).overlap
    assert at.AdaptiveTBPTT(nn.GRU(2, 2), F.mse_loss, losses=35).losses == 35
    assert at.AdaptiveTBPTT(nn.GRU(2, 2), F.mse_loss, long_windows=0).long_windows == 0
    assert at.AdaptiveTBPTT(nn.GRU(2, 2), F.mse_loss, 35).long_windows == 0


@pytest.mark.parametrize(
    ("options", "k", "losses"),
    [
        ({}, 7, 7),
        ({"losses": 10}, 7, 10),
        ({"losses": 10}, 40, 10),
        ({"losses_per_k": 0.5}, 40, 20),
        ({"losses_per_k": 0.5}, 1, 1),
        ({"losses": 10, "losses_per_k": 1.0}, 7, 10),
        ({"losses": 10, "losses_per_k": 1.0}, 40, 40),
        ({"losses": 10, "losses_per_k": 0.5}, 40, 20),
    ],
)
def test_a_window_carries_the_larger_number_of_losses(options, k, losses):
    tbptt = at.AdaptiveTBPTT(nn.GRU(2, 2), F.mse_loss, at.FixedTruncation(40), **options)
    assert tbptt.losses_per_window(k) == losses


def test_windows_grow_to_twice_k():
    """A detach loop, whose windows get longer once the gradient comes from 30 steps back."""
    torch.manual_seed(0)
    stream = delayed(2000, 32, 30, torch.Generator().manual_seed(0))
    model = Recall()
    with torch.no_grad():  # a long memory from the start, so that the test is short
        model.core.bias_hh_l0[16:32] = 3.0
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, estimate_every=4000)
    optimizer, seen = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(16):
        for window in tbptt.windows(stream):
            window.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append((window.first - window.start, window.rated_losses, tbptt.k))
    assert {context for context, _, _ in seen} == {0}
    assert all(rated <= max(20, 2 * k) for _, rated, k in seen)
    assert (0, 2 * tbptt.k, tbptt.k) in seen
    assert tbptt.k >= 32


def test_context_and_losses_grow_once_the_gradient_comes_from_far_back():
    """The inputs of 30 steps ago are asked for; windows start with 10 losses and no context."""
    torch.manual_seed(0)
    stream = delayed(2000, 32, 30, torch.Generator().manual_seed(0))
    model = Recall()
    with torch.no_grad():  # a long memory from the start, so that the test is short
        model.core.bias_hh_l0[16:32] = 3.0
    controller = at.Unbiased(64, base=BestGuess(k_max=64))
    tbptt = at.AdaptiveTBPTT(
        model, F.mse_loss, controller, losses=10, losses_per_k=1.0, estimate_every=4000
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(tbptt, stream, 16, optimizer)
    assert tbptt.k >= 32
    assert tbptt.losses_per_window(tbptt.k) == tbptt.k


def test_estimates_read_at_most_their_share_and_become_rarer():
    request = BestGuess(k_max=4).request(BestGuess(k_max=4).init(), 10)
    affordable = 20 * 8 * 14

    def steps(estimates, trained):
        return steps_between(request, None, None, 0, SoFar(estimates, trained))

    assert steps(0, 0) == affordable // 4
    assert steps(1, 560) == affordable
    assert steps(9, 100_000) == 5000  # 5 % more


def test_estimates_that_change_nothing_become_rarer():
    request = BestGuess(k_max=4).request(BestGuess(k_max=4).init(), 10)

    def past(*found):
        return [Estimate(i, k, 0.5, 0.1, outcome, "") for i, (k, outcome) in enumerate(found)]

    def steps(confirmed):
        return steps_between(request, None, None, 0, SoFar(4, 640, confirmed))

    best = "BEST_GUESS"
    assert count_confirmed([]) == count_confirmed(past((4, best))) == 0
    assert count_confirmed(past((4, best), (4, best))) == 1
    assert count_confirmed(past((4, best), (4, best), (4, best), (4, best))) == 2
    assert count_confirmed(past((4, best), (4, best), (2, best))) == 0
    assert count_confirmed(past((2, best), (4, best), (4, best))) == 1
    assert count_confirmed(past((4, best), (4, "HIDDEN"))) == 0  # noise confirms nothing
    assert count_confirmed(past((4, "HIDDEN"), (4, best))) == 1
    assert (steps(1), steps(2)) == (2 * steps(0), 4 * steps(0))


def test_lightning_may_ask_for_estimates_in_the_middle_of_an_epoch():
    torch.manual_seed(0)
    stream = at.SequenceStream(torch.randn(100, 1, 1), torch.randn(100, 1, 2))
    tbptt = at.AdaptiveTBPTT(nn.RNN(1, 2), F.mse_loss)
    tbptt._tally.since_estimate = tbptt.steps_between_estimates(100) - 1
    assert not tbptt._estimate_is_due(stream)
    tbptt.estimate_every = 7
    assert tbptt._estimate_is_due(stream)


def test_a_resumed_loop_waits_as_long_as_one_that_was_not_stopped():
    tbptt = at.AdaptiveTBPTT(nn.RNN(1, 2), F.mse_loss)
    tbptt.history = [Estimate(i, 0, 0.5, 0.1, "HIDDEN", "") for i in range(3)]
    tbptt._tally.trained = 1_000_000  # so many that news decide
    at_once = tbptt.steps_between_estimates(None)
    tbptt._tally.trained += 20_000
    tbptt._tally.since_estimate += 20_000
    assert tbptt.steps_between_estimates(None) == at_once == 50_000


def test_a_loop_keeps_to_the_schedule():
    torch.manual_seed(0)
    stream = at.SequenceStream(torch.randn(10_000, 1, 1), torch.randn(10_000, 1, 2))
    tbptt = at.AdaptiveTBPTT(nn.RNN(1, 2), F.mse_loss, BestGuess(k_max=4), losses=10, burn_in=0)
    for window in tbptt.windows(stream):
        window.backward()
        assert tbptt.probed_steps <= 0.05 * tbptt.trained_steps + 8 * 14
    assert [e.step for e in tbptt.history] == [560, 2800, 5040, 7280, 9520]


def test_a_stream_of_unknown_length_needs_no_schedule():
    chunks = [(torch.randn(50, 2, 1), torch.randn(50, 2, 2)) for _ in range(60)]
    stream = at.ChunkStream(chunks)
    tbptt = at.AdaptiveTBPTT(nn.RNN(1, 2), F.mse_loss, BestGuess(k_max=4), losses=10, burn_in=0)
    for window in tbptt.windows(stream):
        window.backward()
    assert [e.step for e in tbptt.history] == [560, 2800]


@pytest.mark.parametrize("k", [0, 3, 10, 16])
def test_no_step_runs_only_to_find_a_state(k):
    """Where the next window starts, among the losses too, its state is held."""
    steps = []

    class Counted(nn.GRU):
        def forward(self, x, state=None):
            steps.append(len(x))
            return super().forward(x, state)

    stream = at.SequenceStream(torch.randn(400, 2, 3), torch.randn(400, 2, 4))
    tbptt = at.AdaptiveTBPTT(Counted(3, 4), F.mse_loss, k, losses=10)
    tbptt.prepare(stream)
    for window in tbptt.windows(stream):
        steps.clear()
        window.backward()
        assert sum(steps) == window.stop - window.start


@pytest.mark.parametrize(("steps", "lags"), [(15, None), (41, None), (60, 16), (120, 80)])
def test_a_short_stream_is_measured_as_far_as_it_goes(steps, lags):
    """With 20 steps of burn-in and 20 losses."""
    torch.manual_seed(0)
    stream = at.SequenceStream(torch.randn(steps, 4, 3), torch.randn(steps, 4, 5))
    tbptt = at.AdaptiveTBPTT(nn.GRU(3, 5), F.mse_loss, estimate_every=100)
    for _ in range(12):
        for window in tbptt.windows(stream):
            window.backward()
    assert tbptt.trained_steps == 12 * steps
    assert (tbptt.evidence and tbptt.evidence.lags) == lags


def test_short_chunks_of_unknown_length_are_measured_as_far_as_they_go():
    chunks = [(torch.randn(30, 2, 1), torch.randn(30, 2, 2)) for _ in range(4)]
    stream = at.ChunkStream(chunks)
    tbptt = at.AdaptiveTBPTT(nn.RNN(1, 2), F.mse_loss, estimate_every=300)
    for _ in range(3):
        for window in tbptt.windows(stream):
            window.backward()
    assert tbptt.evidence.lags == 80


@pytest.mark.parametrize("wrap", [None, at.truncate.RateLimited])
def test_windows_of_one_loss_are_not_what_anybody_wants(wrap):
    controller = BestGuess() if wrap is None else wrap(BestGuess())
    with pytest.raises(ValueError, match="such as losses=35"):
        at.AdaptiveTBPTT(nn.RNN(1, 2), F.mse_loss, controller)


def test_a_run_that_goes_on_equals_one_that_was_not_stopped():
    """On chunks of unknown length, with estimates, random contexts and long windows."""

    def made(model):
        return at.AdaptiveTBPTT(
            model,
            F.mse_loss,
            at.Unbiased(16, 0.5, base=BestGuess(k_max=4)),
            losses=4,
            losses_per_k=1.0,
            long_windows=24,
            estimate_every=400,
        )

    def train(stop):
        torch.manual_seed(0)
        model = nn.GRU(1, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        chunks = [(torch.randn(50, 2, 1), torch.randn(50, 2, 2)) for _ in range(30)]
        stream, tbptt = at.ChunkStream(chunks), made(model)
        seen = []
        for _ in range(2):
            for window in tbptt.windows(stream):
                window.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append((window.start, window.first, window.stop))
                if len(seen) == stop:
                    break
            if len(seen) == stop:
                break
        if stop is not None:
            saved = tbptt.state_dict(), stream.state_dict()
            stream, tbptt = at.ChunkStream(chunks), made(model)
            tbptt.load_state_dict(saved[0])
            stream.load_state_dict(saved[1])
            while tbptt.trained_steps < 3000:
                for window in tbptt.windows(stream):
                    window.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    seen.append((window.start, window.first, window.stop))
        return seen, [e.k for e in tbptt.history], [p.detach().clone() for p in model.parameters()]

    whole, ks, parameters = train(None)
    assert len(ks) == 7
    assert max(first - start for start, first, _ in whole) == 16  # drawn
    assert {stop - first for _, first, stop in whole} >= {4, 24}  # long, since the loss stalls
    for stop in (3, 200, 300):
        again, ks_again, parameters_again = train(stop)
        assert (again, ks_again) == (whole, ks)
        assert all(map(torch.equal, parameters, parameters_again))


def test_lags_that_were_asked_for_are_not_given_up():
    stream = at.SequenceStream(torch.randn(60, 4, 3), torch.randn(60, 4, 5))
    tbptt = at.AdaptiveTBPTT(nn.GRU(3, 5), F.mse_loss, BestGuess(), losses=20)
    with pytest.raises(ValueError, match="does not fit into a stream"):
        tbptt.estimate(stream)
