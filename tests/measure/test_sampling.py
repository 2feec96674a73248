"""Random segments of a stream, measured and added up in groups."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at
from adaptive_tbptt.loop.window_pass import window_forward
from adaptive_tbptt.measure import LagRequest, LevelRequest, Source
from adaptive_tbptt.measure.sampling import trained_parameters
from adaptive_tbptt.model.running import warm_up

pytestmark = pytest.mark.usefixtures("double")
ROWS, BURN_IN = 3, 5
CONTEXTS = (0, 1, 4)


def data(steps=80):
    return torch.randn(steps, ROWS, 3), torch.randn(steps, ROWS, 4)


def source(model, stream, loss_fn=F.mse_loss, seed=0, **options):
    objective = at.model.Objective.of(model, loss_fn)
    return Source(objective, stream, BURN_IN, torch.Generator().manual_seed(seed), **options)


def vectors(model, stream, loss_fn, steps, losses, segments, seed=0):
    """By hand, one plain backward pass per window and context: `(segments, levels, numbers)`."""
    drawn = source(model, stream, loss_fn, seed)
    parameters, found = list(trained_parameters(drawn.objective).values()), []
    for _ in range(segments):
        segment = drawn.draw(steps, losses)
        state = warm_up(drawn.objective.recurrent, segment, BURN_IN)
        levels = []
        for context in CONTEXTS:
            skipped = CONTEXTS[-1] - context
            window = segment.between(BURN_IN, segment.steps)
            entering = warm_up(drawn.objective.recurrent, window, skipped, state)
            result = window_forward(
                drawn.objective, window.between(skipped, window.steps), entering, context
            )
            gradient = torch.autograd.grad(
                result.loss, parameters, allow_unused=True, materialize_grads=True
            )
            count = drawn.objective.count_losses(segment.targets[-losses:])
            levels.append(count * torch.cat([g.reshape(-1) for g in gradient]))
        found.append(torch.stack(levels).numpy())
    return np.stack(found)


@pytest.mark.parametrize("groups", [None, 2, 6, 99])
def test_windows_are_dealt_to_groups_and_weighed_by_their_losses(groups):
    model, stream = nn.GRU(3, 4), at.SequenceStream(*data())
    request = LevelRequest(CONTEXTS, losses=2, segments=6, groups=groups)
    sums = request.measure(source(model, stream))
    cumulated = vectors(model, stream, F.mse_loss, request.steps, 2, 6)
    number = 2 if groups == 2 else 6
    expected = cumulated.reshape(6 // number, number, *cumulated.shape[1:]).sum(axis=0)
    np.testing.assert_allclose(np.cumsum(sums.vectors, axis=1), expected, rtol=1e-9, atol=1e-9)
    assert sums.counts.tolist() == [2 * ROWS * 6 / number] * number
    assert (sums.contexts, sums.losses, sums.lags) == (CONTEXTS, 2, 4)


def test_masked_losses_do_not_count():
    class Flat(nn.CrossEntropyLoss):
        def forward(self, out, target):
            return super().forward(out.flatten(0, 1), target.flatten())

    x, _ = data()
    y = torch.randint(4, (80, ROWS))
    y[torch.rand(80, ROWS) < 0.7] = -100
    model, stream = nn.GRU(3, 4), at.SequenceStream(x, y)
    request = LevelRequest(CONTEXTS, losses=2, segments=8)
    sums = request.measure(source(model, stream, Flat()))
    expected = vectors(model, stream, Flat(), request.steps, 2, 8)
    np.testing.assert_allclose(np.cumsum(sums.vectors, axis=1), expected, rtol=1e-9, atol=1e-9)
    assert len(set(sums.counts)) > 1
    assert sums.counts.min() >= 1.0  # windows without any loss are drawn anew


def test_a_stream_of_masks_is_refused():
    y = torch.full((80, ROWS), -100)
    loss = nn.CrossEntropyLoss()
    drawn = source(nn.GRU(3, 4), at.SequenceStream(data()[0], y), loss)
    with pytest.raises(ValueError, match="a hundred random segments held no loss"):
        LevelRequest(CONTEXTS).measure(drawn)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.drop = nn.GRU(3, 4), nn.Dropout(0.5)

    def forward(self, x, state):
        return self.gru(self.drop(x), state)


def test_a_seed_fixes_segments_and_dropout_and_windows_differ():
    model, stream = Dropping(), at.SequenceStream(torch.ones(80, ROWS, 3), torch.ones(80, ROWS, 4))
    request = LevelRequest(CONTEXTS, segments=5)

    def vectors_of(seed, dropout):
        torch.rand(1)  # where the caller's random state is does not matter to a seed
        objective = at.model.Objective.of(model, F.mse_loss)
        generator = torch.Generator().manual_seed(seed)
        where = Source(objective, stream, BURN_IN, generator, seed=dropout)
        return request.measure(where).vectors

    one = vectors_of(0, 3)
    np.testing.assert_array_equal(vectors_of(0, 3), one)
    # The data are constant: only the masks tell the windows apart.
    assert len({window.tobytes() for window in one}) == 5
    assert (vectors_of(0, 4) != one).any()
    assert (vectors_of(0, None) != vectors_of(0, None)).any()


def test_parameters_that_no_gradient_reaches_are_named():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.unused = nn.GRU(3, 4), nn.Linear(2, 2)
            self.frozen = nn.Linear(2, 2).requires_grad_(False)
            self.multiplied = nn.Parameter(torch.ones(()))

        def forward(self, x, state):
            h, state = self.gru(x, state)
            return h + 0.0 * self.multiplied, state

    sums = LevelRequest(CONTEXTS).measure(source(Part(), at.SequenceStream(*data())))
    assert sums.unreached == ("multiplied", "unused.weight", "unused.bias")


def test_a_parameter_of_model_and_loss_counts_once():
    class Tied(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, out, target):
            return F.mse_loss(out @ self.weight[:4, :].t(), target[..., :4])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.gru = nn.Linear(3, 4), nn.GRU(4, 4)
            self.shared = nn.Parameter(torch.randn(4, 4))

        def forward(self, x, state):
            return self.gru(self.embed(x) @ self.shared, state)

    model = Model()
    loss = Tied(model.shared)
    found = trained_parameters(at.model.Objective.of(model, loss))
    assert len(found) == len({id(p) for p in found.values()}) == len(list(model.parameters()))
    assert len(trained_parameters(at.model.Objective.of(nn.GRU(3, 4), Tied(model.shared)))) == 5


def test_a_model_without_anything_to_train_is_refused():
    model = nn.GRU(3, 4).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        LevelRequest(CONTEXTS).measure(source(model, at.SequenceStream(*data())))


class Detached(nn.Module):
    """Drops the gradient of the state it is handed, as some kernels do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(3, 4)

    def forward(self, inputs, state=None):
        return self.layer(inputs, None if state is None else state.detach())


@pytest.mark.parametrize("request_", [LevelRequest(CONTEXTS), LagRequest(8)])
@pytest.mark.parametrize("resets", [False, True])
def test_a_kernel_that_drops_the_gradient_is_refused(request_, resets):
    x, y = data()
    starts = torch.zeros(80, ROWS, dtype=torch.bool)
    starts[::20] = resets
    with pytest.raises(ValueError, match="no gradient reaches the state"):
        request_.measure(source(Detached(), at.SequenceStream(x, y, starts)))


def test_without_any_context_nothing_is_to_be_reached():
    sums = LevelRequest((0,), losses=3).measure(source(Detached(), at.SequenceStream(*data())))
    assert np.abs(sums.vectors).max() > 0


def bad_stream(what, value):
    x, y = data()
    {"inputs": x, "targets": y}[what][37, 1] = value
    return at.SequenceStream(x, y)


@pytest.mark.parametrize("what", ["inputs", "targets"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_segment_that_is_not_finite_is_named(what, value):
    stream = bad_stream(what, value)
    request = LevelRequest(CONTEXTS, losses=2, segments=400)
    drawn = source(nn.GRU(3, 4), stream)
    marks = torch.Generator().manual_seed(0)
    # The first of the same draws that holds the step.
    used = 2 if what == "targets" else request.steps + BURN_IN
    first = next(
        i
        for i in range(400)
        if not torch.isfinite(
            getattr(stream.random_segment(request.steps + BURN_IN, marks), what)[-used:]
        ).all()
    )
    assert first > 0
    with pytest.raises(ValueError, match=rf"segment {first}\b"):
        request.measure(drawn)


def test_numbers_are_checked_at_once():
    for options in ({"losses": 0}, {"segments": 0}):
        with pytest.raises(ValueError, match="losses and segments must be at least 1"):
            LevelRequest(CONTEXTS, **options)


def test_progress_is_told_after_every_window():
    told = []
    LevelRequest(CONTEXTS, segments=3).measure(
        source(nn.GRU(3, 4), at.SequenceStream(*data())), progress=lambda *done: told.append(done)
    )
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_large_models_are_sketched_to_the_size_that_is_asked_for():
    model, stream = nn.GRU(3, 4), at.SequenceStream(*data())
    whole = LevelRequest(CONTEXTS, segments=8).measure(source(model, stream))
    small = LevelRequest(CONTEXTS, segments=8, size=64).measure(source(model, stream))
    assert whole.size == sum(p.numel() for p in model.parameters())
    assert small.size <= 64
    gram = np.einsum("gls,hls->lgh", whole.vectors, whole.vectors)
    sketched = np.einsum("gls,hls->lgh", small.vectors, small.vectors)
    norms = np.sqrt(np.einsum("lgg->lg", gram))
    error = (sketched - gram) / (norms[:, :, None] * norms[:, None, :])
    assert np.sqrt(np.mean(error**2)) < 2 / np.sqrt(small.size)


class Pair:
    """Two processes in one, as the second sees them: sums are doubled, profiles joined."""

    def __init__(self):
        self.seen = []

    def total(self, values):
        self.seen.append(len(list(values)))
        return [2 * v for v in values]

    def total_array(self, values):
        return 2 * values


def test_processes_are_asked_for_sums_and_counts():
    model, stream, both = nn.GRU(3, 4), at.SequenceStream(*data()), Pair()
    request = LevelRequest(CONTEXTS, losses=2, segments=3)
    alone = request.measure(source(model, stream))
    together = request.measure(source(model, stream, processes=both))
    np.testing.assert_allclose(together.vectors, 2 * alone.vectors)
    np.testing.assert_allclose(together.counts, 2 * alone.counts)
