"""Long windows beside the usual ones, once the training loss has stalled."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at
from adaptive_tbptt.loop.long_windows import LongWindows


class Constant(nn.Module):
    """A model whose loss hardly changes, and whose gradient comes from far back."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1e-3))

    def forward(self, x, state=None):
        state = x.new_zeros(x.shape[1], 1) if state is None else state
        outputs = []
        for step in x:
            state = 0.9 * state + step
            outputs.append(state)
        return self.scale * torch.stack(outputs), state


def lengths(truncation, steps=4000, **options):
    torch.manual_seed(0)
    stream = at.SequenceStream(torch.randn(steps, 2, 1), torch.randn(steps, 2, 1))
    tbptt = at.AdaptiveTBPTT(Constant(), F.mse_loss, truncation, **options)
    found = []
    for window in tbptt.windows(stream):
        window.backward()  # no step: the loss stays where it is
        found.append((window.first - window.start, window.losses))
    return found


def test_once_the_loss_stalls_half_of_the_steps_are_in_long_windows():
    found = lengths(0, losses=10, long_windows=40)
    assert set(found[:128]) == {(0, 10)}
    assert found[128:138] == [(0, 10)] * 4 + [(0, 40)] + [(0, 10)] * 4 + [(0, 40)]


def test_long_windows_have_their_context_too():
    found = lengths(7, losses=10, long_windows=40)
    assert found[132] == (7, 40)


def test_without_long_windows_all_are_as_long():
    assert set(lengths(0, steps=3000, losses=10)) == {(0, 10)}
    assert set(lengths(0, steps=3000, losses=10, long_windows=0)) == {(0, 10)}
    assert set(lengths(0, steps=3000, losses=10, long_windows=5)) == {(0, 10)}  # no longer


def test_a_loss_that_falls_needs_none():
    torch.manual_seed(0)
    stream = at.SequenceStream(torch.randn(3000, 4, 1), torch.randn(3000, 4, 1))
    model = Constant()
    tbptt = at.AdaptiveTBPTT(model, lambda y, _: (y**2).mean() + 1.0, 0, losses=10, long_windows=40)
    model.scale.data.fill_(1.0)
    for i, window in enumerate(tbptt.windows(stream)):
        window.backward()
        assert window.losses == 10
        model.scale.data.fill_(0.99**i)


def test_it_goes_on_once_begun_and_counts_usual_windows_only():
    long = LongWindows(30)
    for _ in range(5):
        long.note(10, False, stalled=False)
    assert (long.begun, long.owed, long.next_losses(10)) == (False, 0, 10)
    long.note(10, False, stalled=True)
    assert [long.begun, long.next_losses(10)] == [True, 10]
    for _ in range(3):
        assert long.next_losses(10) == 10
        long.note(10, False, stalled=False)
    assert long.next_losses(10) == 30
    long.note(30, True, stalled=False)
    assert (long.owed, long.next_losses(10)) == (0, 10)


def test_what_the_end_of_the_stream_cuts_off_is_owed_still():
    """Otherwise the long windows lay on the same steps in every epoch."""
    starts = []
    long, first = LongWindows(160, begun=True), 0
    for _ in range(200):
        at_once = long.next_losses(20)
        steps = min(at_once, 900 - first)
        if at_once > 20:
            starts.append(first)
        long.note(steps, at_once > 20, stalled=False)
        first = (first + steps) % 900
    assert set(starts[:3]).isdisjoint(starts[3:6])


def test_a_long_window_takes_no_longer_step():
    torch.manual_seed(0)
    stream = at.SequenceStream(torch.randn(2000, 2, 1), torch.randn(2000, 2, 1))
    model = Constant()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, 0, losses=9, long_windows=36)
    scale, factors = at.StepScale(optimizer), set()
    for window in tbptt.windows(stream):
        window.backward()
        scale.step(window)
        factors.add(scale.factor)
        assert factors == {3.0} or window.losses < 9  # the last one of the epoch
    assert tbptt._tally.long.begun


@pytest.mark.parametrize("losses", [-1, True, 2.5, "many"])
def test_a_length_that_makes_no_sense_is_refused(losses):
    with pytest.raises(ValueError, match="long_windows is the number of losses"):
        at.AdaptiveTBPTT(nn.RNN(1, 2), F.mse_loss, 5, long_windows=losses)
