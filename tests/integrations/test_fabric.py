"""Lightning's Fabric around the plain loop."""

import copy

import pytest
import torch
from torch.nn import functional as F

import adaptive_tbptt as at

from .test_lightning import (
    CLIP,
    L,
    Watched,
    assert_same,
    by_hand,
    chunks,
    pytestmark,
)

__all__ = ["pytestmark"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric_with_the_plain_loop(precision, tmp_path):
    data, model = chunks(), Watched()
    twin, third = copy.deepcopy(model), copy.deepcopy(model)
    control = at.BiasTolerance(delta=0.9, k_max=12, lags=14, gauge=at.truncate.PaperGauge())

    def fit(model, epochs, resume):
        fabric = L.Fabric(accelerator="cpu", devices=1, precision=precision)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        scale = at.StepScale(optimizer, "sqrt")
        model, optimizer = fabric.setup(model, optimizer)
        tbptt = at.AdaptiveTBPTT(model.module, F.mse_loss, control, estimate_every=30, burn_in=1)
        state = {"model": model, "optimizer": optimizer, "tbptt": tbptt}
        if resume:
            fabric.load(tmp_path / "half.ckpt", state)
        stream = at.ChunkStream(data)
        for _ in range(epochs):
            for window in tbptt.windows(stream):
                with fabric.autocast():
                    loss = window.loss()
                fabric.backward(loss)
                fabric.clip_gradients(model, optimizer, max_norm=CLIP.norm)
                scale.step(window)
                optimizer.step()
                optimizer.zero_grad()
        if epochs == 1:
            fabric.save(tmp_path / "half.ckpt", state)
        return tbptt

    whole = fit(model, 2, resume=False)
    if precision == "32-true":
        clip = at.loop.Clip(CLIP.norm)
        plain, _ = by_hand(twin, control, [at.ChunkStream(data)], clip=clip, estimate_every=30)
        assert_same(model, twin, atol=1e-6)
        assert [e.k for e in whole.history] == [e.k for e in plain.history]
    else:
        assert torch.bfloat16 in model.seen  # and float32 while K is estimated
    fit(third, 1, resume=False)
    again = copy.deepcopy(third)
    resumed = fit(again, 1, resume=True)
    assert_same(again, model, atol=0)
    assert resumed.history == whole.history
