"""Checkpoints: a resumed run equals the uninterrupted one, and nothing good is overwritten."""

import signal
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch import nn

import adaptive_tbptt as at
from adaptive_tbptt.errors import TrainingError
from adaptive_tbptt.train.run_folder import RunFolder

from ..small_run import STEPS, StopAt, build, final, interrupted_run, streams, without_times


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
    control = at.truncate.RateLimited(
        at.truncate.Limited(
            at.BiasTolerance(delta=0.3, k_max=12, lags=20, gauge=at.truncate.PaperGauge()), 2, 11
        )
    )

    def make(folder=None):
        return build(folder, controller=control, windows={"losses_per_k": 0.5})

    whole = make()
    whole.fit(*streams(), epochs=3)
    trainer, _ = interrupted_run(tmp_path / "run", [3, 10, 11, 30], make)
    expected = final(whole)
    assert all(torch.equal(final(trainer)[k], expected[k]) for k in expected)


def test_the_recommended_loop_resumes_exactly_too(tmp_path):
    """With random contexts and long windows, and the schedule of the recommended loop."""
    base = at.truncate.BestGuess(k_max=4)
    control = at.Unbiased(16, 0.5, base=base)
    windows = {"losses": 4, "losses_per_k": 1.0, "estimates_per_epoch": None, "long_windows": 12}

    def make(folder=None):
        return build(folder, controller=control, windows=windows)

    whole = make()
    whole.fit(*streams(), epochs=30)
    trainer, _ = interrupted_run(tmp_path / "run", [5, 64, 150, 512, 513], make, epochs=30)
    expected = final(whole)
    assert repr(trainer.tbptt.history) == repr(whole.tbptt.history)  # NaN differs from NaN
    assert len(whole.tbptt.history) > 1
    assert all(torch.equal(final(trainer)[k], expected[k]) for k in expected)


def test_shuffled_sequences_resume_exactly_too(tmp_path):
    _, valid = streams()
    g = torch.Generator().manual_seed(5)
    data = [torch.randn(n, 3, generator=g) for n in (30, 21, 15, 14, 9, 8, 3, 2)]

    def fit(folder, stop=None):
        pairs = [(x, x.roll(1, 0)[:, :2]) for x in data]
        train = at.SequenceStream.from_sequences(pairs, rows=3, shuffle=True)
        assert train.segment(0, train.length).present is not None
        trainer = build(folder, controller=at.FixedTruncation(4))
        if stop:
            StopAt(trainer, stop)
        trainer.fit(train, valid, epochs=3, resume=True)
        return final(trainer), train.state_dict(), trainer.updates

    expected, state, total = fit(tmp_path / "whole")
    assert state["epoch"] == 3
    each = total // 3
    for stop in (each - 1, each, 2 * each + 2):  # before, at and after the end of an epoch
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path / str(stop), stop)
        found, again, _ = fit(tmp_path / str(stop))
        assert all(torch.equal(found[k], expected[k]) for k in expected), stop
        assert again == state


def test_a_stream_of_chunks_resumes_exactly_too(tmp_path):
    train, valid = streams()
    chunks = [train.segment(a, a + 15)[:2] for a in range(0, STEPS, 15)]

    def fit(folder, stop=None):
        trainer = build(folder, windows={"estimate_every": 40})
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
    for epochs in (1, 2, 3):  # stopped where an epoch ends
        trainer = build(tmp_path / "epochs", windows={"estimate_every": 40})
        trainer.fit(at.ChunkStream(chunks), valid, epochs=epochs, resume=True)
    assert all(torch.equal(final(trainer)[k], whole[k]) for k in whole)


def test_a_checkpoint_gives_back_aligned_memory_and_what_schedulers_hold(tmp_path):
    from adaptive_tbptt.train.checkpoint import load, save

    path = tmp_path / "a.safetensors"
    tensors = [torch.arange(n, dtype=torch.float32) for n in range(1, 30)]
    save(path, {"tensors": tensors, "milestones": Counter([3, 3, 7])})
    saved = load(path)
    # Else the CPU may round sums otherwise than in a run that was not interrupted.
    assert {x.data_ptr() % 64 for x in saved["tensors"]} == {0}
    assert all(torch.equal(a, b) for a, b in zip(saved["tensors"], tensors, strict=True))
    assert saved["milestones"] == Counter([3, 3, 7])
    assert isinstance(saved["milestones"], Counter)


def test_a_module_with_extra_state_resumes(tmp_path):
    class Extra(nn.Module):
        def get_extra_state(self):
            return {"calls": 3}

        def set_extra_state(self, state):
            self.seen = state

    for epochs in (1, 2):
        trainer = build(tmp_path)
        trainer.model.extra = Extra()
        trainer.fit(*streams(), epochs=epochs, resume=True)
    assert trainer.model.extra.seen == {"calls": 3}


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
    with pytest.raises(at.train.TrainingError, match="scheduler was LambdaLR, is StepLR"):
        other.fit(*streams(), epochs=4, resume=True)


def test_ctrl_c_during_validation_is_not_lost(tmp_path):
    trainer = build(tmp_path)
    evaluate = trainer.evaluate

    def interrupted(stream):
        signal.raise_signal(signal.SIGINT)
        return evaluate(stream)

    trainer.evaluate = interrupted
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(*streams(), epochs=1)
    resumed = build(tmp_path).fit(*streams(), epochs=1, resume=True)
    assert resumed.epochs == 1


def test_a_listener_of_sigterm_is_left_alone(tmp_path):
    heard = []
    trainer = build(tmp_path)
    evaluate = trainer.evaluate

    def told(stream):
        signal.raise_signal(signal.SIGTERM)
        return evaluate(stream)

    trainer.evaluate = told
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        trainer.fit(*streams(), epochs=1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


def test_a_folder_with_a_run_in_it_is_not_overwritten(tmp_path):
    build(tmp_path).fit(*streams(), epochs=1)
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(at.train.TrainingError, match="already holds a run"):
        build(tmp_path).fit(*streams(), epochs=1)
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_resuming_with_other_settings_or_another_model_is_refused(tmp_path):
    build(tmp_path).fit(*streams(), epochs=1)
    other = build(tmp_path, controller=at.FixedTruncation(3))
    with pytest.raises(
        at.train.TrainingError, match=r"controller was BiasTolerance.*is FixedTruncation"
    ):
        other.fit(*streams(), epochs=2, resume=True)
    trainer = build(tmp_path)
    trainer.model.out = nn.Linear(6, 3)
    before = final(trainer)
    from adaptive_tbptt.errors import CheckpointError

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
    with (
        pytest.warns(UserWarning, match="the loss of steps 50 to 60 is NaN"),
        pytest.raises(at.train.TrainingError, match=r"nan at data step 180, in epoch 2.*last\.saf"),
    ):
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
        at.train.TrainingError, match="a parameter is NaN or infinite after data step 120"
    ):
        trainer.fit(*streams(), epochs=1)
    restored = build(tmp_path, controller=at.FixedTruncation(60))
    restored.fit(*streams(), epochs=1, resume=True)
    assert torch.isfinite(restored.model.out.weight).all()


def test_a_folder_that_cannot_be_written_is_said_before_training(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(
        at.train.TrainingError, match="cannot write to"
    ):  # TensorBoard's writer, if any
        build(blocked / "run").fit(*streams(), epochs=1)
    trainer = build(None)
    trainer.folder = RunFolder(blocked / "run")
    with pytest.raises(at.train.TrainingError, match="cannot write to"):
        trainer.fit(*streams(), epochs=1)
    assert trainer.updates == 0


def test_a_full_disk_is_said_and_the_checkpoint_before_is_intact(tmp_path, monkeypatch):
    build(tmp_path).fit(*streams(), epochs=1)
    saved = (tmp_path / "checkpoints" / "last.safetensors").read_bytes()

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(at.train.TrainingError, match=r"No space left on device.*intact"):
        build(tmp_path).fit(*streams(), epochs=2, resume=True)
    assert (tmp_path / "checkpoints" / "last.safetensors").read_bytes() == saved
    assert not list((tmp_path / "checkpoints").glob(".*partial"))


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is locked there")
def test_a_folder_in_which_another_process_trains_is_left_alone(tmp_path):
    held = f"""
from adaptive_tbptt.train import RunFolder, TrainingError
with RunFolder({str(tmp_path)!r}).locked():
    print("held", flush=True)
    input()
"""
    other = subprocess.Popen(
        [sys.executable, "-c", held], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(TrainingError, match="another process is training in"):
            build(tmp_path).fit(*streams(), epochs=1)
        assert not (tmp_path / "metrics.jsonl").exists()
    finally:
        other.kill()
        other.communicate()
    assert build(tmp_path).fit(*streams(), epochs=1).epochs == 1  # a killed process lets go


def test_a_new_learning_rate_and_other_data_are_said(tmp_path):
    trainer = build(tmp_path)
    trainer.fit(*streams(), epochs=1)
    again = build(tmp_path)
    again.optimizer.param_groups[0]["lr"] = 0.5
    again = at.Trainer(again.tbptt, again.optimizer, run_dir=tmp_path, show=False, clip=again.clip,
                       scheduler=again.scheduler)  # fmt: skip
    train, valid = streams()
    train = at.SequenceStream(train._all.inputs + 1.0, train._all.targets)
    with pytest.warns(UserWarning, match="new options|data differ") as said:
        again.fit(train, valid, epochs=2, resume=True)
    texts = [str(warning.message) for warning in said]
    assert len(texts) == 2
    assert "last.safetensors; new options have no effect" in texts[0]
    assert "lr was given as 0.05, now as 0.5" in texts[0]
    assert "the data differ from those that the run was saved with" in texts[1]
    build(tmp_path).fit(train, valid, epochs=3, resume=True)  # the same again: nothing to say
