"""Lightning's real Trainer on the CPU against the plain loop over the same data."""

import copy
import csv
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import adaptive_tbptt as at

from ..oracle import CoreHead, Scripted

L = pytest.importorskip("lightning", reason="needs pip install 'adaptive-tbptt[lightning]'")

from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from adaptive_tbptt.integrations.lightning import TBPTTModule  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists and is not empty"),
]
ROWS, INPUTS, OUT = 3, 2, 2
UNEVEN = (7, 5, 9, 1, 30, 8, 12, 12)
CLIP = at.loop.Clip(0.05, per_loss=True)


class Mine(TBPTTModule):
    def __init__(self, model, controller, *, carry=True, clip=CLIP, schedule=None, **options):
        monitor = options.pop("monitor", "train_loss")
        super().__init__(carry=carry, clip=clip, monitor=monitor)
        self.model, self.schedule = model, schedule
        options.setdefault("burn_in", 1)
        self.tbptt = at.AdaptiveTBPTT(self.model, F.mse_loss, controller, **options)
        self.steps_per_batch = []

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
        return optimizer if self.schedule is None else self.schedule(optimizer)

    def on_train_batch_start(self, batch, batch_idx):
        self.before = self.trainer.global_step

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.steps_per_batch.append(self.trainer.global_step - self.before)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self.model(batch[0], None)[0], batch[1]))


def gru():
    return CoreHead(nn.GRU(INPUTS, 4), 4, OUT)


def chunks(lengths=UNEVEN, rows=ROWS, resets=False):
    total = sum(lengths)
    data = [torch.randn(total, rows, INPUTS), torch.randn(total, rows, OUT)]
    if resets:
        data.append(torch.rand(total, rows) < 0.1)
    return list(zip(*(part.split(lengths) for part in data), strict=True))


def loader(data):
    """Lightning takes a bare list for a collection of loaders."""
    return DataLoader(data, batch_size=None)


def trainer(epochs=2, **options):
    return L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, "enable_checkpointing": False, **options},
    )


def by_hand(model, controller, streams, epochs=2, clip=CLIP, **options):
    """The plain loop; returns the number of steps and the losses with their weights."""
    options.setdefault("burn_in", 1)
    tbptt = at.AdaptiveTBPTT(model, F.mse_loss, controller, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    scale = at.StepScale(optimizer, "sqrt")
    losses = []
    for _ in range(epochs):
        for stream in streams:
            for window in tbptt.windows(stream):
                loss = window.backward()
                if clip is not None:
                    clip(model.parameters(), window.losses)
                scale.step(window)
                optimizer.step()
                optimizer.zero_grad()
                losses.append((loss.item(), window.weight))
    return tbptt, losses


def assert_same(ours, theirs, **tolerance):
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, **{"rtol": 0, "atol": 1e-12, **tolerance})


def close(values):
    return pytest.approx(values, rel=1e-5)


CONTROLLERS = {
    "fixed": (lambda: at.FixedTruncation(5), {}),
    "scripted": (lambda: Scripted([3, 11, 2, 20]), {"estimate_every": 20}),
    "adaptive": (
        lambda: at.BiasTolerance(delta=0.5, k_max=12, lags=14, gauge=at.truncate.PaperGauge()),
        {"estimate_every": 30},
    ),
    "random": (
        lambda: at.Unbiased(12, 0.5, base=at.truncate.BestGuess(k_max=8)),
        {"losses": 5, "losses_per_k": 1.0, "estimate_every": 30},
    ),
    "recommended": (
        lambda: at.truncate.BestGuess(k_max=8),
        {"losses": 5, "losses_per_k": 2.0, "overlap": False, "estimate_every": 30},
    ),
}


@pytest.mark.filterwarnings("ignore::adaptive_tbptt.TruncationWarning")
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("control", CONTROLLERS)
@pytest.mark.parametrize("lengths", [(84,), UNEVEN, (4,) * 21], ids=["one", "uneven", "short"])
@pytest.mark.parametrize("resets", [False, True])
def test_it_trains_as_the_plain_loop_does(control, lengths, resets):
    make, options = CONTROLLERS[control]
    data, model = chunks(lengths, resets=resets), gru()
    twin = copy.deepcopy(model)
    module, run = Mine(model, make(), **options), trainer()
    run.fit(module, loader(data))
    plain, losses = by_hand(twin, make(), [at.ChunkStream(data)], **options)
    assert_same(model, twin)
    assert run.global_step == len(losses) == sum(module.steps_per_batch)
    assert repr(module.tbptt.history) == repr(plain.history)  # NaN differs from NaN
    assert module.tbptt.probed_steps == plain.probed_steps
    assert (control == "fixed") == (plain.probed_steps == 0)
    assert module.tbptt.trained_steps == 168
    if lengths == UNEVEN:
        assert max(module.steps_per_batch) > 1
    if lengths[0] == 4:
        assert 0 in module.steps_per_batch


@pytest.mark.usefixtures("double")
def test_batches_of_their_own_start_from_the_initial_state():
    data = [*chunks((15, 15)), *chunks((15,), rows=2)]
    model = gru()
    twin = copy.deepcopy(model)
    shuffled = DataLoader(range(3), batch_size=None, collate_fn=lambda i: data[i], shuffle=True)
    module = Mine(model, at.FixedTruncation(6), carry=False)
    order = []
    module.chunk = lambda batch: order.append(batch) or batch
    trainer(epochs=1).fit(module, shuffled)
    assert len(order) == 3
    by_hand(twin, at.FixedTruncation(6), [at.SequenceStream(*batch) for batch in order], epochs=1)
    assert_same(model, twin)


@pytest.mark.usefixtures("double")
def test_a_module_that_is_its_own_model_batch_first_with_batches_of_another_form():
    class Own(TBPTTModule):
        batch_first = True

        def __init__(self):
            super().__init__(clip=CLIP)
            self.rnn = nn.RNN(INPUTS, OUT, batch_first=True)
            self.tbptt = at.AdaptiveTBPTT(self, F.mse_loss, at.FixedTruncation(6))

        def forward(self, x, state):
            return self.rnn(x, state)

        def chunk(self, batch):
            return batch["x"], batch["y"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)

    data, module = chunks((20, 20)), Own()
    twin = copy.deepcopy(module.rnn)
    swapped = [{"x": x.transpose(0, 1), "y": y.transpose(0, 1)} for x, y in data]
    trainer().fit(module, loader(swapped))
    by_hand(twin, at.FixedTruncation(6), [at.ChunkStream(data)])
    assert_same(module.rnn, twin)


def test_what_is_logged(tmp_path):
    data, model = chunks((20,) * 5), gru()
    twin = copy.deepcopy(model)
    control = at.BiasTolerance(
        delta=0.9, k_min=7, k_max=12, lags=14, gauge=at.truncate.PaperGauge()
    )  # 100 = 14 * 7 + 2
    module = Mine(model, control, estimates_per_epoch=1)
    run = trainer(logger=CSVLogger(tmp_path), log_every_n_steps=1)
    run.fit(module, loader(data))
    plain, losses = by_hand(twin, control, [at.ChunkStream(data)], estimate_every=100)
    assert len(plain.history) == 2  # once per epoch: five batches as long as the first
    assert module.tbptt.history == plain.history
    assert sum(w for _, w in losses) == 2 * 100 * ROWS
    sums, epoch_means, seen = 0.0, [], 0.0
    for loss, weight in losses:
        sums, seen = sums + loss * weight, seen + weight
        if seen == 100 * ROWS:
            epoch_means.append(sums / seen)
            sums = seen = 0.0
    with open(f"{run.logger.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    column = {name: [float(r[name]) for r in rows if r[name]] for name in rows[0]}
    assert column["train_loss"] == close(epoch_means)
    assert set(column["k"]) == {float(e.k) for e in plain.history}
    assert column["beta"][-1] == close(plain.history[-1].beta)
    assert column["relative_bias"][-1] == close(plain.history[-1].relative_bias)
    assert run.callback_metrics["train_loss"].item() == close(epoch_means[-1])


class Watched(nn.Module):
    """An RNN that notes the precision it runs in."""

    def __init__(self):
        super().__init__()
        self.into, self.over = nn.Linear(INPUTS, OUT), nn.Linear(OUT, OUT)
        self.seen = set()

    def forward(self, inputs, state):
        state = inputs.new_zeros(inputs.shape[1], OUT) if state is None else state
        outputs = []
        for x in inputs:
            state = torch.tanh(self.into(x) + self.over(state))
            outputs.append(state)
        self.seen.add(state.dtype)
        return torch.stack(outputs), state


def test_mixed_precision_runs_under_the_plugin():
    data, model = chunks(), Watched()
    twin = copy.deepcopy(model)
    trainer(precision="bf16-mixed").fit(Mine(model, at.FixedTruncation(6)), loader(data))
    assert model.seen == {torch.bfloat16}
    # No cache: it would hand out the weights of before the step.
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        by_hand(twin, at.FixedTruncation(6), [at.ChunkStream(data)])
    assert_same(model, twin, atol=1e-6)
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_k_is_estimated_under_mixed_precision():
    control = at.BiasTolerance(delta=0.9, k_max=12, lags=14, gauge=at.truncate.PaperGauge())
    module = Mine(Watched(), control, estimates_per_epoch=1)
    trainer(precision="bf16-mixed").fit(module, loader(chunks((20,) * 5)))
    assert len(module.tbptt.history) == 2


def test_clipping_sees_unscaled_gradients():
    data, model = chunks(), Watched()
    twin = copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    clip = at.loop.Clip(0.1)
    trainer(plugins=[plugin]).fit(Mine(model, at.FixedTruncation(6), clip=clip), loader(data))
    assert model.seen == {torch.float16}
    start = copy.deepcopy(twin)
    by_hand(twin, at.FixedTruncation(6), [at.ChunkStream(data)], clip=clip)
    moved = max(
        (a - b).abs().max() for a, b in zip(start.parameters(), twin.parameters(), strict=True)
    )
    assert moved > 0.1
    assert_same(model, twin, atol=0.01)


def test_double_precision():
    data, model = chunks(), Watched()
    twin = copy.deepcopy(model).double()
    trainer(precision="64-true").fit(Mine(model, at.FixedTruncation(6)), loader(data))
    wide = [tuple(part.double() for part in chunk) for chunk in data]
    by_hand(twin, at.FixedTruncation(6), [at.ChunkStream(wide)])
    assert model.seen == {torch.float64}
    assert_same(model, twin)


def test_schedulers_are_stepped_per_window_and_per_epoch():
    def per_window(optimizer):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 2}]

    def per_epoch(optimizer):
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def rate(schedule):
        run = trainer(epochs=3)
        run.fit(Mine(gru(), at.FixedTruncation(6), schedule=schedule), loader(chunks()))
        return run.optimizers[0].param_groups[0]["lr"]

    assert rate(per_window) == pytest.approx(0.1 * 0.9 ** (14 * 3 // 2))
    assert rate(per_epoch) == pytest.approx(0.1 * 0.5**3)


def test_a_plateau_watches_what_it_is_told_to():
    def plateau(optimizer):
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        watched = scheduler.step
        scheduler.step = lambda metric: (seen.append(float(metric)), watched(metric))
        return [optimizer], [scheduler]

    for monitor in ("train_loss", "val_loss"):
        seen = []
        module = Mine(gru(), at.FixedTruncation(6), schedule=plateau, monitor=monitor)
        run = trainer(num_sanity_val_steps=0)
        run.fit(module, loader(chunks()), loader(chunks((20,))))
        assert len(seen) == 2
        assert seen[-1] == close(run.callback_metrics[monitor].item())
    module = Mine(gru(), at.FixedTruncation(6), schedule=plateau, monitor="nothing")
    with pytest.raises(ValueError, match=r"'nothing', which is not logged: .* k, train_loss"):
        trainer().fit(module, loader(chunks()))


def test_max_steps_counts_windows():
    run = trainer(epochs=-1, max_steps=9)
    module = Mine(gru(), at.FixedTruncation(6))
    run.fit(module, loader(chunks((84,))))
    assert run.global_step == 9
    assert module.tbptt.trained_steps == 54


def test_an_epoch_may_be_cut_short():
    module, run = Mine(gru(), at.FixedTruncation(6)), trainer(limit_train_batches=3)
    run.fit(module, loader(chunks()))
    assert module.tbptt.trained_steps == 2 * (7 + 5 + 9)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(chunks())


def test_a_loader_without_a_length():
    control = at.BiasTolerance(delta=0.9, k_max=12, lags=14, gauge=at.truncate.PaperGauge())
    endless = DataLoader(Endless(), batch_size=None)
    module = Mine(gru(), control, estimate_every=40)
    trainer().fit(module, endless)
    assert module.tbptt.trained_steps == 168
    assert len(module.tbptt.history) == 5
    with pytest.raises(ValueError, match="pass estimate_every="):
        trainer().fit(Mine(gru(), control), endless)


def test_what_cannot_be_right_is_refused():
    data, six = chunks(), at.FixedTruncation(6)
    with pytest.raises(ValueError, match=r"pass clip=Clip\(0.5\) to super"):
        trainer(gradient_clip_val=0.5).fit(Mine(gru(), six), loader(data))
    with pytest.raises(ValueError, match="leave it out and pass losses="):
        trainer(accumulate_grad_batches=2).fit(Mine(gru(), six), loader(data))
    x, y = torch.randn(6, 10, ROWS, INPUTS), torch.randn(6, 10, ROWS, OUT)
    shuffled = DataLoader(TensorDataset(x, y), batch_size=None, shuffle=True)
    with pytest.raises(ValueError, match=r"shuffles: .*or carry=False"):
        trainer().fit(Mine(gru(), six), shuffled)
    with pytest.raises(TypeError, match=r"got dict: override chunk\(batch\)"):
        trainer().fit(Mine(gru(), six), loader([{"x": 1}]))
    module = Mine(gru(), six, schedule=lambda one: [one, copy.deepcopy(one)])
    with pytest.raises(ValueError, match="one optimiser"):
        trainer().fit(module, loader(data))
    module = Mine(gru(), six)
    del module.tbptt
    with pytest.raises(ValueError, match="Mine has no tbptt"):
        trainer().fit(module, loader(data))


@pytest.mark.usefixtures("double")
def test_the_rate_of_adam_is_left_alone():
    class Adam(Mine):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    data, model = chunks(), gru()
    twin = copy.deepcopy(model)
    trainer(epochs=1).fit(Adam(model, at.FixedTruncation(6), clip=None), loader(data))
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.01)
    tbptt = at.AdaptiveTBPTT(twin, F.mse_loss, at.FixedTruncation(6))
    for window in tbptt.windows(at.ChunkStream(data)):
        window.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, twin)


def test_no_hook_is_left_on_the_optimizer():
    run = trainer(epochs=1)
    run.fit(Mine(gru(), at.FixedTruncation(6)), loader(chunks()))
    assert not run.optimizers[0]._optimizer_step_pre_hooks
    assert run.optimizers[0].param_groups[0]["lr"] == 0.1


def test_without_lightning_the_command_is_named():
    code = (
        "import sys; sys.modules['lightning'] = None\n"
        "import adaptive_tbptt, adaptive_tbptt.integrations\n"
        "try: import adaptive_tbptt.integrations.lightning\n"
        "except ImportError as error: print(error)"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "pip install 'adaptive-tbptt[lightning]'" in done.stdout
