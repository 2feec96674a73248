"""Several processes train as one: the same K, the same parameters, checkpoints for any number."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing, nn
from torch.nn import functional as F

import adaptive_tbptt as at
from adaptive_tbptt.distributed import Alone, present_ranks

from ..loop.test_learned_loss import Scaled
from ..oracle import CoreHead

STEPS, ROWS, CLASSES = 90, 5, 4
CONTROL = at.BiasTolerance(delta=0.3, k_min=2, k_max=12, lags=12, gauge=at.truncate.PaperGauge())


class Masked(nn.CrossEntropyLoss):
    """Cross entropy of `(time, batch, classes)`; targets of -1 do not count."""

    def __init__(self):
        super().__init__(ignore_index=-1)

    def forward(self, out, target):
        return super().forward(out.flatten(0, 1), target.flatten())


def make(masked):
    """The same model and data in every process."""
    torch.manual_seed(3)
    model = CoreHead(nn.GRU(3, 6), 6, CLASSES).double()
    x = torch.randn(STEPS, ROWS, 3, dtype=torch.float64)
    y = (x.cumsum(0)[..., 0].abs() % CLASSES).long()
    resets = torch.rand(STEPS, ROWS) < 0.02
    if masked:
        y[torch.rand(STEPS, ROWS) < 0.5] = -1
        y[:, :2] = torch.where(torch.rand(STEPS, 2) < 0.8, -1, y[:, :2])
    return model, at.SequenceStream(x, y, resets)


def make_sequences():
    """The same model and sequences of different lengths in every process."""
    model, stream = make(masked=False)
    whole, lengths = stream.segment(0, STEPS), (90, 70, 41, 30, 25, 24, 7, 2)
    data = [
        (whole.inputs[:n, i % ROWS], whole.targets[:n, i % ROWS]) for i, n in enumerate(lengths)
    ]
    return model, at.SequenceStream.from_sequences(data, rows=4, shuffle=True)


def train_own_loop(
    masked=False, epochs=2, wrapped=False, control=CONTROL, sequences=False, **options
):
    """Train in a person's own loop; return parameters, losses and the history of K."""
    model, stream = make_sequences() if sequences else make(masked)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, weight_decay=0.01)
    given = nn.parallel.DistributedDataParallel(model) if wrapped else model
    tbptt = at.AdaptiveTBPTT(given, Masked(), control, estimates_per_epoch=3, burn_in=4, **options)
    losses = []
    for _ in range(epochs):
        for window in tbptt.windows(stream):
            losses.append(window.backward().item())
            optimizer.step()
            optimizer.zero_grad()
    found = [p.detach() for p in model.parameters()]
    if isinstance(tbptt.evidence, at.estimate.LagProfile):  # levels are kept in float32
        found.append(torch.from_numpy(tbptt.evidence.state_norms))
    return found, losses, [e.k for e in tbptt.history]


def fit(folder, epochs, resume=False, max_seconds=None):
    """Train with the trainer."""
    model, stream = make(masked=True)
    trainer = at.Trainer(
        at.AdaptiveTBPTT(model, Masked(), CONTROL, estimates_per_epoch=3, burn_in=4),
        torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5),
        run_dir=folder,
        clip=at.loop.Clip(0.2),
        checkpoint_seconds=0.0,
        max_seconds=max_seconds,
        show=False,
        tensorboard=False,
    )
    result = trainer.fit(stream, make(masked=True)[1], epochs=epochs, resume=resume)
    losses = [(m["train_loss"], m["valid_loss"], m["k"]) for m in result.history]
    return [p.detach() for p in model.parameters()], losses


def _worker(rank, count, store, result, job, arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=count)
    value = job(**arguments)
    torch.save(value, f"{result}.{rank}")
    dist.destroy_process_group()


def on_ranks(tmp_path, count, job, **arguments):
    """Run a job in several processes; check that all return the same, and return it."""
    number = len(list(tmp_path.glob("store*")))
    store, result = tmp_path / f"store{number}", tmp_path / f"result{number}"
    store.with_suffix(".used").touch()
    multiprocessing.spawn(_worker, (count, store, result, job, arguments), nprocs=count)
    values = [torch.load(f"{result}.{rank}", weights_only=False) for rank in range(count)]
    for value in values[1:]:
        assert all(torch.equal(a, b) for a, b in zip(value[0], values[0][0], strict=True))
        assert value[1:] == values[0][1:]
    return values[0]


def assert_close(a, b):
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


MEASURED = at.BiasTolerance(
    delta=0.3,
    k_min=2,
    k_max=12,
    lags=12,
    gauge=at.truncate.MeasuredGauge(size=32, budget=at.truncate.ProbeBudget(16, 32, 16)),
)


@pytest.mark.filterwarnings("ignore::adaptive_tbptt.TruncationWarning")
@pytest.mark.parametrize(
    ("masked", "control"), [(False, CONTROL), (True, CONTROL), (False, MEASURED)]
)
def test_two_processes_train_as_one_does(tmp_path, masked, control):
    parameters, losses, ks = train_own_loop(masked, control=control)
    options = {"masked": masked, "wrapped": masked, "control": control}
    options["recompute"] = 5 if masked else None  # one process holds all; two may recompute
    theirs, their_losses, their_ks = on_ranks(tmp_path, 2, train_own_loop, **options)
    assert len(set(ks)) > 1, "K never changed: the test shows nothing"
    assert their_ks == ks
    assert_close(theirs, parameters)
    assert their_losses == pytest.approx(losses, rel=1e-9)


def test_two_processes_follow_the_recommended_loop_as_one_does(tmp_path):
    """Both draw the same random contexts, add up the same levels, and agree about long windows."""
    base = at.truncate.BestGuess(k_max=12)
    options = {"control": at.Unbiased(24, 0.5, base=base), "losses": 3, "losses_per_k": 1.0}
    options |= {"long_windows": 9, "epochs": 6}
    parameters, losses, ks = train_own_loop(**options)
    usual = train_own_loop(**{**options, "long_windows": 0})
    assert len(losses) < len(usual[1]), "there were no long windows: the test shows nothing"
    theirs, their_losses, their_ks = on_ranks(tmp_path, 2, train_own_loop, **options)
    assert their_ks == ks
    assert_close(theirs, parameters)
    assert their_losses == pytest.approx(losses, rel=1e-9)


@pytest.mark.filterwarnings("ignore::adaptive_tbptt.TruncationWarning")
def test_two_processes_train_on_padded_rows_as_one_does(tmp_path):
    """From step 65 on, the second process has nothing but padding."""
    options = {"sequences": True, "control": MEASURED}
    parameters, losses, ks = train_own_loop(**options)
    theirs, their_losses, their_ks = on_ranks(tmp_path, 2, train_own_loop, **options)
    assert their_ks == ks
    assert_close(theirs, parameters)
    assert their_losses == pytest.approx(losses, rel=1e-9)


def test_a_checkpoint_goes_on_with_any_number_of_processes(tmp_path):
    whole, history = fit(tmp_path / "whole", epochs=3)
    for first, second in ((2, 1), (1, 3), (3, 2)):
        folder = tmp_path / f"from{first}to{second}"
        run = {1: lambda **a: fit(**a)}
        for count, options in (
            (first, {"epochs": 3, "max_seconds": 0.0}),  # stops after the first window
            (second, {"epochs": 3, "resume": True}),
        ):
            call = run.get(count, lambda n=count, **a: on_ranks(tmp_path, n, fit, **a))
            parameters, seen = call(folder=folder, **options)
        assert_close(parameters, whole)
        assert_close(torch.tensor(seen), torch.tensor(history))


def test_alone_there_is_nothing_to_do():
    ranks = present_ranks()
    assert type(ranks) is Alone
    assert ranks.leads
    stream = make(masked=False)[1]
    assert ranks.deal(stream) is stream
    assert (ranks.total([2.0]), ranks.any([False, True]), ranks.share("a")) == (
        [2.0],
        [False, True],
        "a",
    )


def train_a_loss():
    """Train a model together with its loss."""
    torch.manual_seed(3)
    model, loss = nn.GRU(3, 4).double(), Scaled().double()
    x = torch.randn(40, ROWS, 3, dtype=torch.float64)
    stream = at.SequenceStream(x, x.new_ones(40, ROWS, 4) * torch.arange(ROWS)[:, None])
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    tbptt = at.AdaptiveTBPTT(model, loss, at.FixedTruncation(5))
    for window in tbptt.windows(stream):
        window.backward()
        optimizer.step()
        optimizer.zero_grad()
    return ([p.detach() for p in tbptt.parameters],)


def test_the_parameters_of_a_loss_are_shared_too(tmp_path):
    assert_close(on_ranks(tmp_path, 2, train_a_loss)[0], train_a_loss()[0])


def sparse():
    """Return the sentence that a sparse gradient gives."""

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.layer = nn.Embedding(4, 3, sparse=True), nn.GRU(3, 4)

        def forward(self, x, state):
            return self.layer(self.words(x), state)

    stream = at.SequenceStream(torch.zeros(9, 2, dtype=torch.long), torch.zeros(9, 2, 4))
    try:
        for window in at.AdaptiveTBPTT(Words(), F.mse_loss, at.FixedTruncation(2)).windows(stream):
            window.backward()
    except ValueError as error:
        return [], str(error)


def test_a_sparse_gradient_is_refused(tmp_path):
    assert "nn.Embedding(sparse=False)" in on_ranks(tmp_path, 2, sparse)[1]


def too_few_rows():
    """Return the sentence that more processes than rows give."""
    stream = at.SequenceStream(torch.zeros(9, 1, 3), torch.zeros(9, 1, 4))
    try:
        list(at.AdaptiveTBPTT(nn.GRU(3, 4), F.mse_loss, at.FixedTruncation(2)).windows(stream))
    except ValueError as error:
        return [], str(error)


def test_every_process_needs_a_row(tmp_path):
    assert "1 rows cannot be split over 2 processes" in on_ranks(tmp_path, 2, too_few_rows)[1]


ENDED = """
import os, time, adaptive_tbptt as at, torch.distributed as dist
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
with at.distributed.process_group():
    import torch._dynamo  # as the first step of an optimiser does
    dist.barrier()
for _ in range(100):  # a thread may still be on its way out
    if threads() > before:
        time.sleep(0.1)
print(threads() - before, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_no_thread_of_the_group_outlives_it(tmp_path):
    # One that does may crash the process when Python ends.
    script = tmp_path / "ended.py"
    script.write_text(ENDED)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    printed = subprocess.check_output([*command, str(script)], text=True)
    assert "".join(printed.split()) == "00"  # the two may write at the same moment


def test_the_example_prints_the_same_on_two_processes():
    root = Path(__file__).parents[2]
    example = [str(root / "examples" / "distributed.py"), "--epochs", "1"]
    two = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    printed = []
    for start in ([], two):
        done = subprocess.run(
            [sys.executable, *start, *example],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1]
    assert "epoch  1" in printed[0]
