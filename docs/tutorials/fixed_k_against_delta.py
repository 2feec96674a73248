"""Compare fixed K against delta.

The same model, data and number of epochs; only the truncation differs. What does a K that is too
small cost, what one that is too large, and where does the tolerance land?
"""

# %% [markdown]
# ## The task
#
# A GRU is to output the input of 12 steps ago. A K below 12 does not see what it needs.

# %%
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

import adaptive_tbptt as at
from adaptive_tbptt.diagnosis.figures import BLUE, GREEN, ORANGE, PURPLE, VERMILION

OUT = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/tutorials")
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
# Fixed K and a tolerance are both controllers, so nothing else changes between the runs. As in the
# paper a window of 2K steps carries K losses: a larger K means fewer updates per epoch.


# %%
def run(controller, epochs=9):
    """Train from the same start; return the metrics of every epoch."""
    torch.manual_seed(1)
    model = Delay()
    trainer = at.Trainer(
        at.AdaptiveTBPTT(model, nn.MSELoss(), controller),
        torch.optim.Adam(model.parameters(), lr=1e-2),
        clip=at.loop.Clip(1.0),
        show=False,
    )
    return trainer.fit(train_stream, valid_stream, epochs=epochs).history


settings = {f"K = {k}": at.FixedTruncation(k) for k in (5, 15, 50)}
for delta in (0.5, 0.1):
    controller = at.BiasTolerance(delta=delta, k_min=4, k_max=60, lags=80)
    settings[f"delta = {delta}"] = controller
runs = {}
for name, controller in settings.items():
    runs[name] = run(controller)
    ks = " ".join(f"{row['k']:2d}" for row in runs[name])
    last = runs[name][-1]
    print(
        f"{name:12} loss {last['valid_loss']:.3f}  updates {last['updates']:4d}  K {ks}", flush=True
    )

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
    top.plot(passes, [row["valid_loss"] for row in rows], label=name, **line)
    bottom.plot(passes, [row["k"] for row in rows], **line)
top.set_ylabel("validation loss (squared error)")
top.set_ylim(bottom=0)
top.legend(fontsize="small")
bottom.axhline(12, color="0.5", lw=1)
bottom.text(5.0, 11.3, "memory of the task", color="0.3", fontsize="small", va="top")
bottom.set_ylabel("truncation length K (steps)")
bottom.set_xlabel("passes over the data (probes included)")
bottom.set_ylim(bottom=0)
OUT.mkdir(parents=True, exist_ok=True)
figure.savefig(OUT / "tutorial-compare.png", dpi=130)

# %% [markdown]
# ![Validation loss and K of five settings](../img/tutorial-compare.png)
#
# - **K = 5** makes the most updates and learns nothing.
# - **K = 50** learns, but makes a tenth of the updates of K = 5.
# - **K = 15** is the best of all: the K of someone who knows that the task needs 12.
# - **delta** is told nothing. It begins low; then the gradient spreads over so many lags that no K
#   up to 60 meets the tolerance, which a warning says; and K comes down as the gradient gathers at
#   the lags that count: to about 14 for 0.5, to about 27 for 0.1, which is cautious
#   ([what it means](../what-it-means.md)).
#
# So a tolerance does not beat the K one would choose knowing the answer: both end between K = 15
# and K = 50, 0.5 nearer to the first. They need no search over K, each point of which is a training
# run.

# %% [check]
final = {name: rows[-1]["valid_loss"] for name, rows in runs.items()}
assert final["K = 15"] < final["K = 50"] < final["K = 5"]
assert final["delta = 0.1"] < final["K = 5"]
