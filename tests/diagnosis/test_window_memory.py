"""How long a window fits into memory: bytes counted by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at
from adaptive_tbptt.data import Segment
from adaptive_tbptt.diagnosis.window_memory import WindowMemory, held_bytes
from adaptive_tbptt.loop.window_pass import Recompute
from adaptive_tbptt.model import Objective

ROWS, SIZE, LOSSES = 4, 6, 10
LEAF = ROWS * SIZE * 4  # bytes of a state in float32
RANDOM = torch.get_rng_state().nbytes


class Squares(nn.Module):
    """h' = (a h)^2 + x holds a step's h and a h, two leaves; the readout holds its features."""

    def __init__(self):
        super().__init__()
        self.scale, self.readout = nn.Parameter(torch.full((SIZE,), 0.1)), nn.Linear(SIZE, 1)

    def core(self, x, state):
        state = torch.zeros_like(x[0]) if state is None else state.clone()
        seen = []
        for xt in x:
            state = (self.scale * state).square() + xt
            seen.append(state)
        return torch.stack(seen), state

    def head(self, features):
        return self.readout(features)


def mean(outputs, targets):
    return outputs.mean()  # it holds nothing


def segment(steps):
    return Segment(torch.randn(steps, ROWS, SIZE), torch.randn(steps, ROWS, 1))


@pytest.mark.parametrize(("context", "losses"), [(0, 5), (7, 5), (20, 1)])
def test_bytes_are_those_of_the_tensors_held(context, losses):
    objective = Objective.of(Squares(), mean)
    found = held_bytes(objective, segment(context + losses), torch.zeros(ROWS, SIZE), context)
    assert found == (2 * (context + losses) + losses) * LEAF


def test_what_runs_again_is_not_held():
    objective = Objective.of(Squares(), mean)
    state = torch.zeros(ROWS, SIZE)
    found = held_bytes(objective, segment(20), state, 5, Recompute(4))
    assert found == (2 * 3 + 15) * LEAF  # the last piece has 3 steps; 15 features are read


def diagnosed(model=None, **options):
    x, y = torch.randn(120, ROWS, SIZE), torch.randn(120, ROWS, 1)
    how = at.diagnosis.Sampling(burn_in=3)
    return at.diagnose(
        model or Squares(), mean, (x, y), LOSSES, lags=8, segments=10, sampling=how, **options
    )


def test_diagnose_measures_the_bytes_of_a_step():
    memory = diagnosed().memory
    assert memory == WindowMemory(LOSSES, 0.0, 3 * LEAF, 2 * LEAF, LEAF, LEAF + RANDOM)


def test_the_longest_window_fits_and_one_more_step_does_not():
    found = diagnosed()
    held = 3 * LOSSES * LEAF  # of the losses
    for context in (0, 1, 50):
        gigabytes = (held + 2 * context * LEAF) / 1e9
        assert found.longest_window(gigabytes) == LOSSES + context
        assert found.longest_window(gigabytes - 1e-9) == LOSSES + context - 1
    assert found.longest_window(0.0) == 0
    # 50 steps at a time: 2 leaves for each, one for every loss, and a restart for each piece.
    again = (2 * 50 + LOSSES) * LEAF + 40 * (LEAF + RANDOM)
    assert found.longest_window(again / 1e9, recompute=50) == 50 * 40
    assert found.longest_window(again / 1e9) < 50 * 40


def test_the_dict_has_the_bytes():
    assert diagnosed().to_dict()["memory"]["context_step"] == 2 * LEAF


def test_a_layer_of_torch_holds_more_per_step_than_its_outputs():
    x, y = torch.randn(120, ROWS, 3), torch.randn(120, ROWS, SIZE)
    how = at.diagnosis.Sampling(burn_in=3)
    found = at.diagnose(
        nn.LSTM(3, SIZE), F.mse_loss, (x, y), LOSSES, lags=8, segments=10, sampling=how
    )
    assert found.memory.context_step > 2 * LEAF
    assert found.memory.restart == 2 * LEAF + RANDOM
    assert found.longest_window(1.0, recompute=50) > 5 * found.longest_window(1.0)


def test_the_sentence_recommends_pieces_that_hold_more():
    memory = WindowMemory(10, 0.0, 2e4, 1e4, 1e3, 5e3)
    held = memory.longest(0.01)
    words = memory.sentence(0.01).replace(",", "")
    pieces = int(words.split("recompute=")[1].split()[0])
    recomputed = memory.longest(0.01, pieces)
    assert f"hold a window of {held} steps" in words
    assert f"one of {recomputed} steps" in words
    assert recomputed > 50 * held
    tiny = WindowMemory(10, 0.0, 2.0, 1.0, 1.0, 1.0)
    assert tiny.sentence(0.1) == "0.1 GB hold a window of more than 1,000,000 steps."
    assert memory.sentence(8).endswith("Parameters, optimiser and data come on top.")
    assert "one of more than 1,000,000 steps" in memory.sentence(8)
