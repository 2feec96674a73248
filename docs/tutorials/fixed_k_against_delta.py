"""Compare fixed K against delta.

The same model, data and number of updates; only the context differs. What does a K that is too
small cost, what one that is too large, and where does the tolerance land?
"""

# %% [markdown]
# ## The task
#
# The target of the GRU is its input 12 steps ago. A window carries 10 losses after K steps of
# context, so its last loss sees 9 + K lags. A loop without context never sees lag 12.

# %%
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

import adaptive_tbptt as at
from adaptive_tbptt.diagnosis.palette import BLUE, GREEN, ORANGE, PURPLE, VERMILION

OUT = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/tutorials")
LOSSES = 10
torch.manual_seed(0)
signs = torch.randint(2, (1200, 32, 1)) * 2.0 - 1.0
answers = torch.roll(signs, 12, dims=0)
train_stream = at.SequenceStream(signs[:1000], answers[:1000])
valid_stream = at.SequenceStream(signs[1000:], answers[1000:])


class Delay(nn.Module):
    """A GRU and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.readout = nn.GRU(1, 40), nn.Linear(40, 1)

    def core(self, inputs, state):
        """Carry the state."""
        return self.gru(inputs, state)

    def head(self, features):
        """Read it out."""
        return self.readout(features)


# %% [markdown]
# ## The settings
#
# Fixed K and a tolerance are both controllers, so nothing else changes between the runs.
# `losses=10` gives every setting the same number of updates. What a larger K costs is computing
# time: a window runs K + 10 steps for its 10 losses. K = 0 is the usual loop that detaches the
# state every 10 steps.


# %%
def run(controller, epochs=9):
    """Train from the same start; return the metrics of every epoch."""
    torch.manual_seed(1)
    model = Delay()
    trainer = at.Trainer(
        at.AdaptiveTBPTT(model, nn.MSELoss(), controller, losses=LOSSES),
        torch.optim.Adam(model.parameters(), lr=1e-2),
        clip=at.loop.Clip(1.0),
        show=False,
    )
    return trainer.fit(train_stream, valid_stream, epochs=epochs).history


settings = {f"K = {k}": at.FixedTruncation(k) for k in (0, 15, 50)}
for delta in (0.5, 0.1):
    controller = at.BiasTolerance(delta=delta, k_min=4, k_max=64, lags=100)
    settings[f"delta = {delta}"] = controller
runs = {}
for name, controller in settings.items():
    runs[name] = run(controller)
    ks = [row["k"] for row in runs[name]]
    steps = sum(k + LOSSES for k in ks) / (LOSSES * len(ks))
    loss = runs[name][-1]["valid_loss"]
    print(f"{name:12} loss {loss:.3f}  steps run per loss {steps:.1f}  K", *ks, flush=True)

# %% [markdown]
# ## What comes out

# %%
figure = Figure(figsize=(7.0, 6.0), layout="constrained")
top, bottom = figure.subplots(2, 1, sharex=True)
colours, styles = (ORANGE, BLUE, PURPLE, GREEN, VERMILION), (":", "--", "-.", "-", "-")
for (name, rows), colour, style in zip(runs.items(), colours, styles, strict=True):
    passes = [row["data_passes"] for row in rows]
    marker = {"delta = 0.5": "s", "delta = 0.1": "o"}.get(name)
    line = {"color": colour, "ls": style, "lw": 1.8, "marker": marker, "ms": 4}
    for axes, key in ((top, "valid_loss"), (bottom, "k")):
        axes.plot(passes, [row[key] for row in rows], **line)
        shift = {"K = 15": 6, "K = 50": -6}.get(name, 0) if axes is top else 0
        end = passes[-1], rows[-1][key]
        axes.annotate(name, end, (7, shift), textcoords="offset points", color=colour, va="center")
top.set_title("A fixed K must be guessed; a tolerance lets K grow as the model learns")
top.set_ylabel("validation loss (squared error)")
top.set_ylim(bottom=0)
bottom.axhline(12, color="0.5", lw=1)
bottom.text(6.2, 11.3, "memory of the task", color="0.3", fontsize="small", va="top")
bottom.set_ylabel("truncation length K (steps)")
bottom.set_xlabel("passes over the data (estimates included)")
bottom.set_ylim(bottom=0)
for axes in (top, bottom):
    axes.spines[["top", "right"]].set_visible(False)
OUT.mkdir(parents=True, exist_ok=True)
figure.savefig(OUT / "tutorial-compare.png", dpi=130)

# %% [markdown]
# ![Validation loss and K of five settings](../img/tutorial-compare.png)
#
# - **K = 0**, the plain detach loop, learns nothing: no loss sees 12 steps back.
# - **K = 15** is the choice of someone who knows that the task needs 12.
# - **K = 50** learns as well, and runs 6 steps for every loss where K = 15 runs 2.5.
# - **delta** is told nothing. It begins at `k_min`, since an untrained model has hardly any
#   gradient from far back, and K grows as the model learns to remember: to 8 for 0.5, and to 16 and
#   once 32 for 0.1. While the evidence leaves several K open, K stays where it is, which a warning
#   says.
#
# So a tolerance does not beat the K that you would choose if you knew the answer. Both deltas start
# later, and their losses end between those of K = 0 and K = 15. But they need no search over K,
# each point of which is a training run. Where a late start costs too much, start with a large K and
# let it fall slowly ([how](../what-it-means.md#a-right-answer-can-keep-a-model-from-learning)).
#
# Measuring is not free. An estimate backpropagates 8 windows of 130 steps (24 the first time),
# about as many steps as this small data set has. The figure counts them, so the deltas need twice
# the passes for the same number of updates. With a hundred times the data, one estimate per epoch
# would add one per cent.

# %% [check]
final = {name: rows[-1]["valid_loss"] for name, rows in runs.items()}
assert final["K = 15"] < final["delta = 0.1"] < final["K = 0"]
