"""A loss may have parameters: they are clipped, saved and gone on with as those of the model."""

import pytest
import torch
from torch import nn

import adaptive_tbptt as at


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, out, target):
        return ((out - target) ** 2 / self.log_scale.exp() + self.log_scale).mean()


def build(folder=None, **options):
    torch.manual_seed(0)
    model, loss = nn.GRU(3, 4), Scaled()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    tbptt = at.AdaptiveTBPTT(model, loss, at.FixedTruncation(5))
    trainer = at.Trainer(tbptt, optimizer, run_dir=folder, show=False, tensorboard=False, **options)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(60, 2, 7, generator=generator)
    return trainer, at.SequenceStream(x[..., :3], 10 * x[..., 3:])


def test_it_is_part_of_a_checkpoint(tmp_path):
    whole, stream = build()
    whole.fit(stream, epochs=3)
    first, stream = build(tmp_path)
    first.fit(stream, epochs=1)
    second, stream = build(tmp_path)
    second.fit(stream, epochs=3, resume=True)
    assert second.loss_fn.log_scale == whole.loss_fn.log_scale != first.loss_fn.log_scale


def test_the_best_of_it_comes_back_with_the_best_model(tmp_path):
    def throw_off(trainer, metrics):
        nn.init.constant_(trainer.loss_fn.log_scale, 60.0)

    trainer, stream = build(tmp_path, callbacks=[throw_off])
    valid = build()[1]
    trainer.fit(stream, valid, epochs=2)
    assert trainer.best_epoch == 1
    assert trainer.evaluate(valid) != trainer.best_loss
    trainer.load_best()
    assert trainer.evaluate(valid) == trainer.best_loss
    again, stream = build(tmp_path)
    again.fit(stream, valid, epochs=2, resume=True)
    again.load_best()
    assert again.evaluate(valid) == trainer.best_loss


def test_it_is_clipped_with_the_rest():
    trainer, stream = build(clip=at.loop.Clip(0.01))
    norms = []

    def note(optimizer, *rest):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(torch.stack([g.norm() for g in gradients]).norm().item())

    trainer.optimizer.register_step_pre_hook(note)
    trainer.fit(stream, epochs=1)
    assert norms == pytest.approx([0.01] * len(norms), rel=1e-4)


def test_parameters_that_nobody_would_save_are_refused():
    model, stranger = nn.GRU(3, 4), nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([*model.parameters(), stranger], lr=0.1)
    tbptt = at.AdaptiveTBPTT(model, nn.MSELoss(), at.FixedTruncation(5))
    with pytest.raises(ValueError, match="1 of the optimiser's parameters belong neither"):
        at.Trainer(tbptt, optimizer)
