import json
import os
import signal

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at
from adaptive_tbptt.run_folder import RunFolder

STEPS, ROWS = 120, 4


class Model(nn.Module):
    """Dropout and a buffer: things that only an exact resume gets right."""

    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(3, 6, 2, dropout=0.3), nn.Linear(6, 2)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(()))

    def core(self, x, state):
        self.calls += 1
        return self.lstm(x, state)

    def head(self, h):
        return self.out(self.drop(h))

    def forward(self, x, state):
        h, state = self.core(x, state)
        return self.head(h), state


def streams():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, ROWS, 3, generator=g)
    y = torch.roll(x, 3, 0)[..., :2]
    return at.SequenceStream(x, y), at.SequenceStream(x[:40], y[:40])


def build(run_dir=None, controller=None, **options):
    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    controller = controller or at.BiasTolerance(delta=0.3, k_max=12, window=20, k_init=4)
    return at.Trainer(
        model, F.mse_loss, optimizer, controller, run_dir=run_dir, scheduler=scheduler,
        clip=at.Clip(1.0, per_loss=True), estimates_per_epoch=3, burn_in=3, show=False, **options,
    )  # fmt: skip


class StopAt:
    """A logger's view of a run, and an interruption after a given number of updates."""

    def __init__(self, trainer, updates):
        self.trainer, self.updates = trainer, updates
        update = trainer._update

        def counted(window):
            update(window)
            if trainer.updates == updates:
                os.kill(os.getpid(), signal.SIGINT)

        trainer._update = counted


def final(trainer):
    return {k: v.clone() for k, v in trainer.model.state_dict().items()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    trainer = build(folder)
    result = trainer.fit(*streams(), epochs=3)
    return folder, trainer, result


def without_times(lines):
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


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
    # Probes count as data: 3 passes and 23 steps per estimate.
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
            scale.step(window.k)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    ours, theirs = final(trainer), model.state_dict()
    assert all(torch.equal(ours[k], theirs[k]) for k in ours if k != "calls")


def interrupted_run(folder, stops, make=build):
    for stop in stops:
        trainer = make(folder)
        StopAt(trainer, stop)
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(*streams(), epochs=3, resume=True)
    trainer = make(folder)
    result = trainer.fit(*streams(), epochs=3, resume=True)
    return trainer, result


def test_a_resumed_run_equals_the_uninterrupted_one_wherever_it_stopped(uninterrupted, tmp_path):
    folder, whole, result = uninterrupted
    expected = final(whole)
    total = whole.updates
    # Every eleventh update, and those right before and right after a new K came into use.
    steps = {e.step for e in whole.tbptt.history}
    boundaries, seen = set(), 0
    replay = build()
    update = replay._update

    def watch(window):
        update(window)
        if replay.tbptt.trained_steps in steps:
            boundaries.update((replay.updates, replay.updates + 1))

    replay._update = watch
    replay.fit(*streams(), epochs=3)
    assert len(boundaries) >= 10
    for stop in sorted({*range(1, total, 11), *sorted(boundaries)[:8]} - {total, total + 1}):
        trainer, again = interrupted_run(tmp_path / str(stop), [stop])
        ours = final(trainer)
        assert all(torch.equal(ours[k], expected[k]) for k in expected), stop
        assert trainer.tbptt.history == whole.tbptt.history
        assert again.best_loss == result.best_loss
        rows = [
            without_times((f / "metrics.jsonl").read_text().splitlines())
            for f in (folder, tmp_path / str(stop))
        ]
        assert rows[0] == rows[1]
        seen += 1
    assert seen >= 8


def test_many_interruptions_and_wrappers_resume_exactly_too(tmp_path):
    control = at.RateLimited(at.Smoothed(at.BiasTolerance(delta=0.3, k_max=12, window=20)))

    def make(folder=None):
        return build(folder, controller=control, losses=0.5)

    whole = make()
    whole.fit(*streams(), epochs=3)
    trainer, _ = interrupted_run(tmp_path / "run", [3, 10, 11, 30], make)
    expected = final(whole)
    assert all(torch.equal(final(trainer)[k], expected[k]) for k in expected)


def test_a_stream_of_chunks_resumes_exactly_too(tmp_path):
    train, valid = streams()
    chunks = [train.segment(a, a + 15)[:2] for a in range(0, STEPS, 15)]

    def fit(folder, stop=None):
        trainer = build(folder, estimate_every=40)
        if stop:
            StopAt(trainer, stop)
        trainer.fit(at.ChunkStream(chunks), valid, epochs=3, resume=True)
        return final(trainer)

    whole = fit(tmp_path / "whole")
    for stop in (5, 30):
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path / "parts", stop)
    parts = fit(tmp_path / "parts")
    assert all(torch.equal(parts[k], whole[k]) for k in whole)


def test_extending_a_finished_run_equals_a_longer_one(tmp_path):
    build(tmp_path / "a").fit(*streams(), epochs=1)
    trainer = build(tmp_path / "a")
    trainer.fit(*streams(), epochs=2, resume=True)
    longer = build(tmp_path / "b")
    longer.fit(*streams(), epochs=2)
    assert all(torch.equal(final(trainer)[k], final(longer)[k]) for k in final(longer))


def test_best_parameters_are_kept_apart_and_survive_a_resume(tmp_path):
    class Worsens:
        """A loss that grows with every validation, so that epoch 1 stays the best."""

        def __init__(self, trainer):
            self.calls, self.evaluate = 0, trainer.evaluate

        def __call__(self, stream):
            self.calls += 1
            return self.calls * 10.0

    first = None
    for epochs in (1, 2, 3):
        trainer = build(tmp_path / "run")
        trainer.evaluate = Worsens(trainer)
        trainer.evaluate.calls = epochs - 1
        trainer.fit(*streams(), epochs=epochs, resume=True)
        if epochs == 1:
            first = final(trainer)
    assert trainer.best_epoch == 1
    assert any(not torch.equal(v, first[k]) for k, v in final(trainer).items())
    trainer.load_best()
    assert all(torch.equal(v, first[k]) for k, v in final(trainer).items())


def test_a_validation_loss_that_is_not_finite_is_never_the_best():
    trainer = build()
    losses = iter([float("nan"), 2.0, 3.0])
    trainer.evaluate = lambda stream: next(losses)
    result = trainer.fit(*streams(), epochs=3)
    assert (result.best_epoch, result.best_loss) == (2, 2.0)


def test_schedulers_are_restored_and_others_refused(tmp_path):
    def make(folder, kind=torch.optim.lr_scheduler.LambdaLR):
        trainer = build(folder)
        optimizer = trainer.optimizer
        if kind is torch.optim.lr_scheduler.LambdaLR:
            trainer.scheduler = kind(optimizer, lambda epoch: 1 / (1 + epoch))
        else:
            trainer.scheduler = kind(optimizer, 2)
        trainer.settings["scheduler"] = kind.__name__
        return trainer

    for epochs in (1, 2, 3):
        trainer = make(tmp_path / "run")
        trainer.fit(*streams(), epochs=epochs, resume=True)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 4)
    other = make(tmp_path / "run", torch.optim.lr_scheduler.StepLR)
    with pytest.raises(at.TrainingError, match="scheduler was LambdaLR, is StepLR"):
        other.fit(*streams(), epochs=4, resume=True)


def test_ctrl_c_during_validation_is_not_lost(tmp_path):
    trainer = build(tmp_path)
    evaluate = trainer.evaluate

    def interrupted(stream):
        os.kill(os.getpid(), signal.SIGINT)
        return evaluate(stream)

    trainer.evaluate = interrupted
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(*streams(), epochs=1)
    resumed = build(tmp_path).fit(*streams(), epochs=1, resume=True)
    assert resumed.epochs == 1


def test_the_optimiser_is_left_as_it_was():
    trainer = build(controller=at.FixedTruncation(9))
    trainer.scheduler = None
    for _ in range(2):
        again = at.Trainer(
            trainer.model, F.mse_loss, trainer.optimizer, at.FixedTruncation(9), show=False
        )
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
    recurrent = at.as_recurrent(model, batch_first=True)
    trainer = at.Trainer(
        recurrent, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), at.FixedTruncation(5),
        show=False,
    )  # fmt: skip
    trainer.fit(stream, stream, epochs=1)
    plain = nn.GRU(3, 2)
    plain.load_state_dict(model.gru.state_dict())
    expected = at.evaluate(plain, F.mse_loss, stream)
    assert at.evaluate(model, F.mse_loss, stream, batch_first=True) == pytest.approx(expected)
    report = at.diagnose(
        model, F.mse_loss, stream, window=20, burn_in=2, samples=4, batch_first=True
    )
    assert report.profile.window == 20


def test_a_folder_with_a_run_in_it_is_not_overwritten(tmp_path):
    build(tmp_path).fit(*streams(), epochs=1)
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(at.TrainingError, match="already holds a run"):
        build(tmp_path).fit(*streams(), epochs=1)
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_resuming_with_other_settings_or_another_model_is_refused(tmp_path):
    build(tmp_path).fit(*streams(), epochs=1)
    other = build(tmp_path, controller=at.FixedTruncation(3))
    with pytest.raises(at.TrainingError, match=r"controller was BiasTolerance.*is FixedTruncation"):
        other.fit(*streams(), epochs=2, resume=True)
    trainer = build(tmp_path)
    trainer.model.out = nn.Linear(6, 3)
    before = final(trainer)
    from adaptive_tbptt.checkpoint import CheckpointError

    with pytest.raises(CheckpointError, match=r"out\.bias is \(2,\) there and \(3,\) here"):
        trainer.fit(*streams(), epochs=2, resume=True)
    assert all(torch.equal(before[k], v) for k, v in final(trainer).items())
    shorter = streams()[1]
    with pytest.raises(ValueError, match="120 steps of 4 rows, this one 40"):
        build(tmp_path).fit(shorter, epochs=2, resume=True)


def test_a_nan_loss_stops_says_where_and_keeps_the_last_good_checkpoint(tmp_path):
    trainer = build(tmp_path, controller=at.FixedTruncation(10))
    trainer.fit(*streams(), epochs=1)
    saved = (tmp_path / "checkpoints" / "last.safetensors").read_bytes()
    again = build(tmp_path, controller=at.FixedTruncation(10))
    train, valid = streams()
    train._all.targets[55] = float("nan")  # in the window of steps 50 to 60 of epoch 2
    with pytest.raises(at.TrainingError, match=r"nan at data step 180, in epoch 2.*last\.saf"):
        again.fit(train, valid, epochs=2, resume=True)
    assert (tmp_path / "checkpoints" / "last.safetensors").read_bytes() == saved


def test_a_parameter_that_is_not_finite_is_not_saved(tmp_path):
    trainer = build(tmp_path, controller=at.FixedTruncation(60), checkpoint_seconds=0)
    update = trainer._update

    def poison(window):
        update(window)
        if trainer.updates == 2:
            trainer.model.out.weight.data[0, 0] = float("inf")

    trainer._update = poison
    with pytest.raises(
        at.TrainingError, match="a parameter is NaN or infinite after data step 120"
    ):
        trainer.fit(*streams(), epochs=1)
    restored = build(tmp_path, controller=at.FixedTruncation(60))
    restored.fit(*streams(), epochs=1, resume=True)
    assert torch.isfinite(restored.model.out.weight).all()


def test_a_folder_that_cannot_be_written_is_said_before_training(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(at.TrainingError, match="cannot write to"):  # TensorBoard's writer, if any
        build(blocked / "run").fit(*streams(), epochs=1)
    trainer = build(None)
    trainer.folder = RunFolder(blocked / "run")
    with pytest.raises(at.TrainingError, match="cannot write to"):
        trainer.fit(*streams(), epochs=1)
    assert trainer.updates == 0


def test_a_full_disk_is_said_and_the_checkpoint_before_is_intact(tmp_path, monkeypatch):
    from adaptive_tbptt import checkpoint

    build(tmp_path).fit(*streams(), epochs=1)
    saved = (tmp_path / "checkpoints" / "last.safetensors").read_bytes()

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(at.TrainingError, match=r"No space left on device.*intact"):
        build(tmp_path).fit(*streams(), epochs=2, resume=True)
    assert (tmp_path / "checkpoints" / "last.safetensors").read_bytes() == saved
    assert not list((tmp_path / "checkpoints").glob(".*partial"))


def test_patience_and_time_end_a_run():
    class Worse:
        def __init__(self):
            self.value = 0.0

        def __call__(self, outputs, targets):
            self.value += 1.0
            return F.mse_loss(outputs, targets) + self.value

    trainer = build(patience=2)
    trainer.loss_fn = Worse()
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


def test_progress_is_plain_lines_where_there_is_no_terminal(capsys):
    trainer = build()
    trainer.show = True
    trainer.fit(*streams(), epochs=2)
    lines = capsys.readouterr().err.strip().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["epoch 1", "epoch 2"]
    for word in ("loss", "valid", "K", "beta", "bias"):
        assert word in lines[-1]


def test_a_live_line_on_a_terminal_shows_rate_and_time_left():
    from io import StringIO

    from rich.console import Console

    from adaptive_tbptt.progress import ProgressDisplay

    text = StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    with ProgressDisplay(100, console=console) as display:
        display.update(50, "epoch 1  loss 0.5")
        display.say("epoch 1 done")
    assert "epoch 1  loss 0.5" in text.getvalue()
    assert "steps/s" in text.getvalue()


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


def test_a_window_that_will_not_fit_is_said_before_training(monkeypatch):
    from adaptive_tbptt import memory as module

    monkeypatch.setattr(module, "free_bytes", lambda device: 1000)
    with pytest.warns(ResourceWarning, match="k_max=12 needs about"):
        build().fit(streams()[0], epochs=1)


def test_the_estimate_of_a_windows_memory_is_about_right():
    from adaptive_tbptt.backprop import default_weigh
    from adaptive_tbptt.memory import activation_bytes, estimate_window_bytes

    recurrent = at.as_recurrent(Model())
    stream, weigh = streams()[0], default_weigh(F.mse_loss)
    guess = estimate_window_bytes(recurrent, F.mse_loss, stream.segment(0, 24), 40, 30, weigh)
    truth = activation_bytes(recurrent, F.mse_loss, stream.segment(0, 70), 40, weigh)
    assert guess == pytest.approx(truth, rel=0.15)


@pytest.mark.parametrize("options", [{"scheduler_per": "day"}, {"patience": 0}])
def test_options_are_checked(options):
    with pytest.raises(ValueError, match="must be"):
        build(**options)
    with pytest.raises(ValueError, match="epochs"):
        build().fit(streams()[0], epochs=0)
    with pytest.raises(ValueError, match="run_dir"):
        build().fit(streams()[0], epochs=1, resume=True)


def test_training_time_is_told_by_the_clock_that_was_given():
    ticks = iter(range(10_000))
    train, _ = streams()
    trainer = build(clock=lambda: float(next(ticks)))
    trainer.fit(train, epochs=1)
    assert trainer.history[-1]["seconds"] == trainer.updates  # one tick a window
