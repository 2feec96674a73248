"""Lightning's checkpoints: a resumed run is the uninterrupted one, as far as its loader allows."""

import copy

import pytest
import torch

import adaptive_tbptt as at

from .test_lightning import (
    L,
    Mine,
    assert_same,
    chunks,
    gru,
    loader,
    pytestmark,
    trainer,
)

__all__ = ["pytestmark"]


class Resumable:
    """A loader that goes on where it was, as torchdata's StatefulDataLoader does."""

    def __init__(self, data):
        self.data, self.at, self.begin = data, 0, 0

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        self.at, self.begin = self.begin, 0
        while self.at < len(self.data):
            self.at += 1
            yield self.data[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, saved):
        self.begin = saved["at"]


def adaptive(model, **options):
    def halve(optimizer):
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    control = at.truncate.RateLimited(
        at.BiasTolerance(delta=0.05, k_max=12, lags=14, gauge=at.truncate.PaperGauge())
    )
    return Mine(model, control, schedule=halve, estimate_every=30, **options)


@pytest.mark.filterwarnings("ignore::adaptive_tbptt.TruncationWarning")
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("validate", [False, True])
def test_resuming_at_the_end_of_an_epoch_changes_nothing(tmp_path, validate):
    data, model = chunks(), gru()
    valid = loader(chunks((20,))) if validate else None
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    whole = adaptive(model)
    trainer(epochs=4).fit(whole, loader(data), valid)

    def saving(epochs):
        keep = L.pytorch.callbacks.ModelCheckpoint(tmp_path, filename="end")
        return trainer(epochs, enable_checkpointing=True, callbacks=[keep])

    saving(2).fit(adaptive(first), loader(data), valid)
    resumed, run = adaptive(second), saving(4)
    run.fit(resumed, loader(data), valid, ckpt_path=tmp_path / "end.ckpt")
    assert len(resumed.steps_per_batch) == 2 * len(data)
    assert_same(second, model)
    assert resumed.tbptt.history == whole.tbptt.history
    assert len(whole.tbptt.history) > 4
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**4)


@pytest.mark.filterwarnings("ignore::adaptive_tbptt.TruncationWarning")
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("batches", [4, 13])
def test_resuming_inside_an_epoch_with_a_resumable_loader_changes_nothing(tmp_path, batches):
    data, model = chunks(), gru()
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    whole = adaptive(model)
    trainer(epochs=3).fit(whole, Resumable(data))
    save = SaveAfter(tmp_path / "middle.ckpt", batches)
    trainer(epochs=3, callbacks=[save]).fit(adaptive(first), Resumable(data))
    held = torch.load(tmp_path / "middle.ckpt", weights_only=True)["adaptive_tbptt"]["stream"][
        "held"
    ]
    assert sum(len(x) for x, *_ in held) < 84
    resumed = adaptive(second)
    trainer(epochs=3).fit(resumed, Resumable(data), ckpt_path=tmp_path / "middle.ckpt")
    assert len(resumed.steps_per_batch) == 3 * len(data) - batches
    assert_same(second, model)
    assert resumed.tbptt.history == whole.tbptt.history


class SaveAfter(L.Callback):
    def __init__(self, path, batches):
        self.path, self.batches = path, batches

    def on_train_batch_end(self, trainer, module, *_):
        self.batches -= 1
        if self.batches == 0:
            trainer.save_checkpoint(self.path)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.filterwarnings("ignore::adaptive_tbptt.TruncationWarning")
def test_resuming_inside_an_epoch_with_another_loader_starts_the_state_anew(tmp_path):
    data = chunks()
    save = SaveAfter(tmp_path / "middle.ckpt", 4)
    module = adaptive(gru())
    trainer(epochs=1, callbacks=[save]).fit(module, loader(data))
    resumed = adaptive(gru())
    starts = []
    windows = resumed.tbptt.windows
    resumed.tbptt.windows = lambda stream: starts.append(stream.cursor) or windows(stream)
    with pytest.warns(UserWarning, match="a loader that is not resumable: Lightning reads"):
        trainer(epochs=1).fit(resumed, loader(data), ckpt_path=tmp_path / "middle.ckpt")
    assert starts[0] == 0
    before = torch.load(save.path, weights_only=True)["adaptive_tbptt"]["tbptt"]["trained_steps"]
    assert resumed.tbptt.trained_steps == before + 7 + 5 + 9 + 1  # counts go on


def test_a_checkpoint_of_another_controller_leaves_k_alone(tmp_path):
    run = trainer(epochs=1)
    run.fit(Mine(gru(), at.FixedTruncation(6)), loader(chunks()))
    run.save_checkpoint(tmp_path / "six.ckpt")
    module = Mine(gru(), at.FixedTruncation(9))
    with pytest.warns(UserWarning, match=r"made with FixedTruncation\(k=6\), so its K is not"):
        trainer(epochs=2).fit(module, loader(chunks()), ckpt_path=tmp_path / "six.ckpt")
    assert module.tbptt.k == 9
