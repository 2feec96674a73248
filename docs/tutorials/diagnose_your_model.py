"""Diagnose your model.

How far back do the gradients of your model reach, and which truncation length does that ask for?
You need a module, a loss and some data; no training, and nothing of yours is changed.
"""

# %% [markdown]
# ## The model and the data
#
# A GRU is to output the sum of its inputs of 3 and of 8 steps ago. Data are `(time, batch,
# features)`; every row is one long sequence.

# %%
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

import adaptive_tbptt as at
from adaptive_tbptt.diagnosis.figures import BLUE, VERMILION

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
# `diagnose` cuts random segments out of the data, warms the state up, and measures how the gradient
# of a loss shrinks with every step back in time.

# %%
before = at.diagnose(model, loss_fn, (inputs, targets), lags=80, samples=256)
print(before)

# %% [markdown]
# Read the table from the left: for this tolerance, this K; the interval says how much K would
# change with other samples; the bound is the estimated relative bias at K. `beta` is the shrinkage
# per step, and the line below the table says whether one step can stretch the state.
#
# An untrained GRU forgets quickly, so a small K is enough. That is an answer about *these*
# parameters: the task needs eight steps, and nothing here knows it yet.
#
# ## After some training
#
# Train with a generous fixed K, then ask again.

# %%
stream = at.SequenceStream(inputs, targets)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
tbptt = at.AdaptiveTBPTT(model, loss_fn, at.FixedTruncation(20))
for _epoch in range(8):
    for window in tbptt.windows(stream):
        window.backward()
        optimizer.step()
        optimizer.zero_grad()
print("loss", round(at.evaluate(model, loss_fn, stream), 4))
after = at.diagnose(model, loss_fn, stream, lags=80, samples=256)
print(after)

# %% [markdown]
# K has grown: the model has learnt to carry what it needs. This is why a K chosen once is either
# too small later or wasteful now, and why training re-estimates it.
#
# `report.figure(path)` draws one decay curve with every K marked. Here are both curves in one
# picture, from the numbers in the report.

# %%
figure = Figure(figsize=(7.0, 4.2), layout="constrained")
axes = figure.add_subplot()
for report, colour, style, name in (
    (before, BLUE, "-", "before training"),
    (after, VERMILION, "--", "after training"),
):
    mean = report.profile.mean
    k = report.decisions[-1].k
    label = f"{name}: K = {k} for delta = 0.1"
    axes.plot(mean / mean.max(), color=colour, ls=style, lw=2, label=label)
    axes.axvline(k, color=colour, ls=":", lw=1.5)
axes.set_yscale("log")
axes.set_xlabel("lag k (steps back from the loss)")
axes.set_ylabel("mean gradient norm, relative to its largest")
axes.legend()
axes.grid(alpha=0.25, lw=0.5)
OUT.mkdir(parents=True, exist_ok=True)
figure.savefig(OUT / "tutorial-diagnose.png", dpi=130)

# %% [markdown]
# ![Decay of the gradient before and after training](../img/tutorial-diagnose.png)
#
# The trained curve stays high up to lag 8, where the task's memory ends, and falls from there.
#
# ## Your own model
#
# Replace `model`, `loss_fn` and the two tensors. If the report notes that a tolerance is met only
# past tau, measure a longer `window`; if it says that the gradient does not decay, see
# [the questions](../faq.md).

# %% [check]
assert after.decisions[-1].k > before.decisions[-1].k
