"""The trainer: it learns, reports, obeys its options."""

import itertools
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at

from ..small_run import (
    STEPS,
    Model,
    build,
    final,
    streams,
    without_times,
)


def test_it_learns_and_reports(uninterrupted):
    folder, trainer, result = uninterrupted
    assert (result.epochs, result.stopped) == (3, "epochs")
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]
    losses = [row["valid_loss"] for row in result.history]
    assert result.best_loss == min(losses)
    assert result.best_epoch == losses.index(min(losses)) + 1
    rows = without_times((folder / "metrics.jsonl").read_text().splitlines())
    assert [r["epoch"] for r in rows if r["event"] == "epoch"] == [1, 2, 3]
    estimates = [r for r in rows if r["event"] == "estimate"]
    assert len(estimates) == len(trainer.tbptt.history) >= 7
    assert {"k", "beta", "relative_bias", "outcome"} <= estimates[0].keys()
    # ProbeBudget count as data: 3 passes and 23 steps per estimate.
    passes = 3 + len(estimates) * 23 / STEPS
    assert result.history[-1]["data_passes"] == pytest.approx(passes)


def test_best_parameters_are_those_of_the_best_epoch(uninterrupted):
    _, trainer, result = uninterrupted
    last = final(trainer)
    trainer.load_best()
    assert at.evaluate(trainer.model, F.mse_loss, streams()[1]) == pytest.approx(result.best_loss)
    trainer.model.load_state_dict(last)


def test_the_trainer_is_the_loop_one_would_write():
    control = at.FixedTruncation(5)
    trainer = build(controller=control)
    trainer.fit(streams()[0], epochs=2)
    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    scale = at.StepScale(optimizer, "sqrt")
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, control)
    stream = streams()[0]
    for _ in range(2):
        for window in tbptt.windows(stream):
            window.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0 / 5)
            scale.step(window)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    ours, theirs = final(trainer), model.state_dict()
    assert all(torch.equal(ours[k], theirs[k]) for k in ours if k != "calls")


@pytest.mark.parametrize(("kind", "rule"), [("SGD", "sqrt"), ("Adam", "none")])
def test_the_rate_follows_the_losses_for_sgd_and_not_for_adam(kind, rule):
    def fit(**options):
        torch.manual_seed(3)
        model = Model()
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
        tbptt = at.AdaptiveTBPTT(model, F.mse_loss, at.FixedTruncation(9))
        trainer = at.Trainer(tbptt, optimizer, show=False, **options)
        trainer.fit(streams()[0], epochs=1)
        return trainer

    default, said = fit(), fit(step_scale=rule)
    other = fit(step_scale={"sqrt": "none", "none": "sqrt"}[rule])
    assert default.settings["step_scale"] == rule
    assert torch.equal(default.model.out.weight, said.model.out.weight)
    assert not torch.equal(default.model.out.weight, other.model.out.weight)


def test_a_validation_loss_that_is_not_finite_is_never_the_best():
    trainer = build()
    losses = iter([float("nan"), 2.0, 3.0])
    trainer.evaluate = lambda stream: next(losses)
    result = trainer.fit(*streams(), epochs=3)
    assert (result.best_epoch, result.best_loss) == (2, 2.0)


def test_the_optimiser_is_left_as_it_was():
    trainer = build(controller=at.FixedTruncation(9))
    trainer.scheduler = None
    for _ in range(2):
        tbptt = at.AdaptiveTBPTT(trainer.model, F.mse_loss, at.FixedTruncation(9))
        again = at.Trainer(tbptt, trainer.optimizer, show=False)
        again.fit(streams()[0], epochs=1)
        assert trainer.optimizer.param_groups[0]["lr"] == 0.05
    assert not trainer.optimizer._optimizer_step_pre_hooks


def test_callbacks_may_add_what_they_like(tmp_path):
    import numpy as np

    def extra(trainer, metrics):
        metrics["numpy"], metrics["nested"] = np.float32(2.5), {"bad": [float("nan"), 1.0]}

    build(tmp_path, callbacks=[extra]).fit(*streams(), epochs=1)
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["numpy"] == 2.5
    assert row["nested"] == {"bad": [None, 1.0]}


def test_a_wrapped_model_says_how_it_is_laid_out():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, 2, batch_first=True)

        def forward(self, x, state):
            return self.gru(x, state)

    model = Hidden()
    stream = streams()[0]
    recurrent = at.model.as_recurrent(model, batch_first=True)
    tbptt = at.AdaptiveTBPTT(recurrent, F.mse_loss, at.FixedTruncation(5))
    trainer = at.Trainer(tbptt, torch.optim.SGD(model.parameters(), lr=0.1), show=False)
    trainer.fit(stream, stream, epochs=1)
    plain = nn.GRU(3, 2)
    plain.load_state_dict(model.gru.state_dict())
    expected = at.evaluate(plain, F.mse_loss, stream)
    assert at.evaluate(model, F.mse_loss, stream, batch_first=True) == pytest.approx(expected)
    (found,) = at.check_bias(recurrent, F.mse_loss, stream, 5, lags=20, burn_in=2)
    assert found.lags == 20


def test_patience_and_time_end_a_run():
    trainer = build(patience=2)
    evaluate, worse = trainer.evaluate, itertools.count()
    trainer.evaluate = lambda stream: evaluate(stream) + next(worse)
    result = trainer.fit(*streams(), epochs=50)
    assert (result.stopped, result.epochs, result.best_epoch) == ("patience", 3, 1)
    result = build(max_seconds=0.0).fit(*streams(), epochs=50)
    assert (result.stopped, result.epochs) == ("time", 0)


def test_schedulers_per_window_and_on_a_plateau():
    trainer = build(controller=at.FixedTruncation(10), scheduler_per="window")
    trainer.fit(streams()[0], epochs=1)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.97**12)
    plateau = build(controller=at.FixedTruncation(10))
    plateau.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(plateau.optimizer, patience=0)
    plateau.fit(*streams(), epochs=2)


def test_other_loggers_get_everything_and_are_closed():
    class Memory:
        def __init__(self):
            self.rows, self.closed = [], False

        def log(self, metrics, step):
            self.rows.append((step, metrics["event"]))

        def close(self):
            self.closed = True

    memory = Memory()
    build(loggers=[memory]).fit(*streams(), epochs=1)
    assert memory.closed
    assert memory.rows[-1] == (STEPS, "epoch")


def test_tensorboard_gets_the_numbers_when_asked_for(tmp_path, monkeypatch):
    import sys
    import types

    written = []

    class Writer:
        def __init__(self, folder):
            self.folder = folder

        def add_scalar(self, name, value, step):
            written.append((name, step))

        def close(self):
            written.append("closed")

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    build(tmp_path, tensorboard=True).fit(*streams(), epochs=1)
    assert ("valid_loss", STEPS) in written
    assert ("k", STEPS) in written
    assert written[-1] == "closed"
    with pytest.raises(ValueError, match="needs a run_dir"):
        build(tensorboard=True)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'adaptive-tbptt\[tensorboard\]'"):
        build(tmp_path / "other", tensorboard=True)


def cpu_allocator_fails():
    torch.empty(2**60, dtype=torch.uint8)  # more than any address space holds


def gpu_allocator_fails():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("fail", [cpu_allocator_fails, gpu_allocator_fails])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_window_that_does_not_fit_into_memory_is_named(tmp_path, fail, when):
    trainer = build(tmp_path, at.FixedTruncation(10), windows={"losses": 30}, checkpoint_seconds=0)

    def run_out(*_):
        if trainer.updates == 2:
            fail()

    if when == "forward":
        trainer.model.out.register_forward_pre_hook(run_out)
    else:
        trainer.model.out.bias.register_hook(run_out)
    said = r"30 losses, in epoch 1: pass recompute=50, or lower k_max .*, losses or .*last\.saf"
    with pytest.raises(at.train.TrainingError, match=said) as raised:
        trainer.fit(*streams(), epochs=1)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert build(tmp_path, at.FixedTruncation(10), windows={"losses": 30}).fit(
        *streams(), epochs=1, resume=True
    )


def test_other_errors_of_a_window_are_left_as_they_are():
    trainer = build()
    trainer.model.out.register_forward_pre_hook(lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        trainer.fit(streams()[0], epochs=1)


def test_a_gradient_from_before_is_no_part_of_the_first_update():
    found = []
    for stale in (False, True):
        trainer = build()  # seeds the dropout too
        for parameter in trainer.model.parameters():
            parameter.grad = torch.ones_like(parameter) if stale else None
        trainer.fit(streams()[0], epochs=1)
        found.append(final(trainer))
    assert all(torch.equal(found[0][k], found[1][k]) for k in found[0])


def test_a_schedule_by_validation_is_not_stepped_by_windows():
    trainer = build()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.optimizer)
    with pytest.raises(ValueError, match="once per epoch"):
        at.Trainer(trainer.tbptt, trainer.optimizer, scheduler=plateau, scheduler_per="window")


@pytest.mark.parametrize(
    "options", [{"scheduler_per": "day"}, {"patience": 0}, {"step_scale": "log"}]
)
def test_options_are_checked(options):
    with pytest.raises(ValueError, match="must be"):
        build(**options)
    with pytest.raises(ValueError, match="epochs"):
        build().fit(streams()[0], epochs=0)
    with pytest.raises(ValueError, match="run_dir"):
        build().fit(streams()[0], epochs=1, resume=True)


def test_the_old_form_gets_a_sentence():
    trainer = build()
    model, optimizer = trainer.model, trainer.optimizer
    for old in (
        (model, F.mse_loss, optimizer, at.FixedTruncation(3)),
        (model, optimizer),
        (at.model.as_recurrent(model), optimizer),
    ):
        with pytest.raises(TypeError, match=r"got (Model|Recurrent) first: write Trainer\(Adapt"):
            at.Trainer(*old)


def test_training_time_is_told_by_the_clock_that_was_given():
    ticks = iter(range(10_000))
    train, _ = streams()
    trainer = build(clock=lambda: float(next(ticks)))
    trainer.fit(train, epochs=1)
    assert trainer.history[-1]["seconds"] == trainer.updates  # one tick a window


def test_what_is_no_stream_is_refused_with_a_sentence():
    pair = (torch.zeros(9, 2, 3), torch.zeros(9, 2, 2))
    train, _ = streams()
    for given in ((pair,), (train, pair)):
        with pytest.raises(TypeError, match="expected a stream, got tuple"):
            build().fit(*given, epochs=1)
    with pytest.raises(TypeError, match="expected a stream, got tuple"):
        at.evaluate(nn.GRU(3, 2), F.mse_loss, pair)
    with pytest.raises(ValueError, match="eval_chunk must be at least 1"):
        build(eval_chunk=0)


def test_a_validation_that_is_never_finite_ends_patience():
    x = torch.full((40, 4, 3), float("nan"))
    trainer = build(patience=2)
    result = trainer.fit(streams()[0], at.SequenceStream(x, x[..., :2]), epochs=9)
    assert (result.stopped, result.epochs, result.best_epoch) == ("patience", 2, None)
    with pytest.raises(at.train.TrainingError, match="no validation gave a finite loss"):
        trainer.load_best()


def test_an_epoch_without_a_target_ends_all_the_same():
    model, loss = nn.GRU(3, 4), nn.CrossEntropyLoss(ignore_index=-1)
    tbptt = at.AdaptiveTBPTT(
        model, lambda out, target: loss(out.flatten(0, 1), target.flatten()),
        at.FixedTruncation(5), count_losses=lambda targets: 0.0,
    )  # fmt: skip
    trainer = at.Trainer(tbptt, torch.optim.SGD(model.parameters(), lr=0.1), show=False)
    stream = at.SequenceStream(torch.randn(20, 2, 3), torch.full((20, 2), -1))
    assert trainer.fit(stream, epochs=1).history[0]["train_loss"] is None


def test_a_controller_of_ones_own_can_be_resumed(tmp_path):
    class Mine(at.FixedTruncation):
        __repr__ = at.truncate.Controller.__repr__

    for epochs in (1, 2):
        result = build(tmp_path, Mine(4)).fit(*streams(), epochs=epochs, resume=True)
    assert result.epochs == 2
