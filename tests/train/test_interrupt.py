"""Signals during training are meant for training, not for what it starts."""

import multiprocessing
import os
import signal
import sys

import pytest
import torch
from torch import nn

import adaptive_tbptt as at
from adaptive_tbptt.train.interrupt import DeferredInterrupt

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


def _wait(ready):
    ready.set()
    while True:
        signal.pause()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_forked_meanwhile_ends_when_it_is_told_to(number):
    context = multiprocessing.get_context("fork")
    # What the child gets back; a suite that runs in the background starts with SIGINT ignored.
    usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = signal.signal(number, usual[number])
    try:
        _fork_and_signal(context, number)
    finally:
        signal.signal(number, before)


def _fork_and_signal(context, number):
    with DeferredInterrupt() as interrupt:
        ready = context.Event()
        child = context.Process(target=_wait, args=(ready,))
        child.start()
        assert ready.wait(20)
        os.kill(child.pid, number)
        child.join(20)
        ended = not child.is_alive()
        child.kill()
        assert ended
        assert not interrupt.pending
        os.kill(os.getpid(), number)
        assert interrupt.pending


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_pool_in_a_callback_does_not_hang():
    def callback(trainer, metrics):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            metrics["score"] = sum(pool.map(abs, range(-2, 2)))

    model = nn.GRU(3, 4)
    tbptt = at.AdaptiveTBPTT(model, nn.MSELoss(), at.FixedTruncation(5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = at.Trainer(tbptt, optimizer, callbacks=[callback], show=False)
    stream = at.SequenceStream(torch.randn(10, 2, 3), torch.zeros(10, 2, 4))
    assert trainer.fit(stream, epochs=4).history[-1]["score"] == 4
