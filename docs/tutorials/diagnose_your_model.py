"""Diagnose your model.

How much of the gradient does your training loop miss, and what would more context cost? You need a
module, a loss and some data. Nothing is trained, and your module is left as it was.
"""

# %% [markdown]
# ## The model and the data
#
# The target of the GRU is the sum of its inputs 3 and 8 steps ago. Data are `(time, batch,
# features)`; every row is one long sequence.

# %%
import sys
from pathlib import Path

import torch
from torch import nn

import adaptive_tbptt as at

OUT = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/tutorials")
torch.manual_seed(0)
inputs = torch.randn(2000, 32, 1)
targets = torch.roll(inputs, 3, dims=0) + torch.roll(inputs, 8, dims=0)


class DelayedSum(nn.Module):
    """A GRU and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.readout = nn.GRU(1, 32), nn.Linear(32, 1)

    def core(self, inputs, state):
        """Carry the state."""
        return self.gru(inputs, state)

    def head(self, features):
        """Read it out."""
        return self.readout(features)


model, loss_fn = DelayedSum(), nn.MSELoss()

# %% [markdown]
# ## Before training
#
# Suppose that your loop detaches the state every 10 steps: a window has `losses=10` and no context.
# `diagnose` draws random windows from the data and measures their gradient with 0, 1, 2, 4, ...
# steps of context before them, all in one backward pass. `segments=64` fixes how many windows it
# draws; by default it stops after 30 seconds at the latest.

# %%
before = at.diagnose(model, loss_fn, (inputs, targets), losses=10, lags=64, segments=64)
print(before)

# %% [markdown]
# The first row is your loop as it is. *Misses* is the relative bias of its mean gradient, compared
# with 64 steps of context. The interval says how far other windows of the same data would move that
# number. *Cost* is the time of a window, relative to the first row, measured on your model.
#
# This table describes *these* parameters. The task needs eight steps, but an untrained GRU forgets
# within a few, so its gradient does not show that yet.
#
# ## After some training
#
# Train with a generous fixed context, then ask again.

# %%
stream = at.SequenceStream(inputs, targets)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
tbptt = at.AdaptiveTBPTT(model, loss_fn, at.FixedTruncation(20), losses=20)
for _epoch in range(8):
    for window in tbptt.windows(stream):
        window.backward()
        optimizer.step()
        optimizer.zero_grad()
print("loss", round(at.evaluate(model, loss_fn, stream), 4))
after = at.diagnose(model, loss_fn, stream, losses=10, lags=64, segments=64)
print(after)
after.figure(OUT / "tutorial-diagnose.png")

# %% [markdown]
# ![Bias against context, and against cost, after training](../img/tutorial-diagnose.png)
#
# The model now carries values for eight steps, so the same loop misses more of the gradient, and 8
# steps of context remove most of the bias. A context that was enough before training is not enough
# after it; `AdaptiveTBPTT` therefore measures again while you train.
#
# `after.rows` holds the table as numbers, `after.recommendation` the sentence below it, and
# `after.to_dict()` both, ready for JSON:

# %%
loop = after.rows[0]
print(f"context {loop.context}: bias {loop.bias:.3f} [{loop.low:.3f}, {loop.high:.3f}]")
print(after.recommendation)

# %% [markdown]
# ## The paper's diagnosis
#
# The paper asks another question: which K keeps the bias of a *single* loss below delta? It answers
# with a bound, made of how fast the norm of the state's gradient decays with the lag. `probe`
# measures that decay, `bias_bound` bounds the bias, and `check_bias` then measures the bias of
# single losses at the K that the bound asks for.

# %%
segment = stream.random_segment(84)
profile = at.probe(model, loss_fn, segment.inputs, segment.targets, burn_in=20)
fit = at.fit_decay(profile.mean)
bound = at.bias_bound(profile.mean, fit)
print(f"beta {fit.beta:.4f} from lag {fit.tau} on, {profile.samples} losses")
choices = [at.choose_truncation(bound, delta=delta, k_max=64) for delta in (0.9, 0.5, 0.1)]
for choice in choices:
    print(choice.message)
for checked in at.check_bias(model, loss_fn, stream, [choice.k for choice in choices], lags=64):
    print(checked)

# %% [markdown]
# `beta` is the factor by which the gradient shrinks per step back in time. The bound is the paper's
# estimate of the relative bias at K. It is not a guarantee ([what does 0.1
# mean?](../what-it-means.md)), so compare it with the measured bias in the last lines.
# `diagnose(..., bound=True)` shows it as a column. The package that reproduces the paper also has
# intervals of the bound and the stability of the model ([API](../api/paper.md)).
#
# ## Your own model
#
# Replace `model`, `loss_fn` and the two tensors, and set `losses` to the steps of your windows. If
# a row is not resolved, give more `seconds`. If a note says that the gradient has not decayed,
# raise `lags`. `at.check(model, loss_fn, data)` lists everything about your model and loss that is
# not as the library assumes.

# %% [check]
assert after.rows[0].bias > before.rows[0].bias
assert next(row for row in after.rows if row.context == 8).bias < after.rows[0].bias / 2
