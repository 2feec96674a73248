"""Train adaptively on your own text.

A character model on any text file, in one loop, with K chosen from a tolerance. Without a file it
takes the language reference that comes with Python.
"""

# %% [markdown]
# ## Text to numbers
#
# To use your own text, read it into `text`, or pass the file to the script:
#
# `python docs/tutorials/train_on_your_text.py runs/tutorials my.txt`

# %%
import sys
import textwrap
from pathlib import Path
from pydoc_data.topics import topics

import torch
from matplotlib.figure import Figure
from torch import nn

import adaptive_tbptt as at
from adaptive_tbptt.diagnosis.palette import BLUE, ORANGE

OUT = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/tutorials")
text = Path(sys.argv[2]).read_text() if len(sys.argv) > 2 else "\n".join(topics.values())
text = text[:120_000]
letters = sorted(set(text))
number = {letter: i for i, letter in enumerate(letters)}
tokens = torch.tensor([number[letter] for letter in text])
print(f"{len(text)} characters, {len(letters)} different")

# %% [markdown]
# ## One long text, many rows
#
# The text is cut into 32 long rows that are read side by side, each in order. Every character is to
# predict the next. The last tenth of every row is kept for validation.

# %%
ROWS = 32
steps = (len(tokens) - 1) // ROWS
inputs = tokens[: ROWS * steps].view(ROWS, steps).T  # (time, batch)
targets = tokens[1 : ROWS * steps + 1].view(ROWS, steps).T
cut = steps * 9 // 10
train = at.SequenceStream(inputs[:cut], targets[:cut])
valid = at.SequenceStream(inputs[cut:], targets[cut:])


class Characters(nn.Module):
    """Embedding, LSTM, readout."""

    def __init__(self, letters: int, hidden: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, 32)
        self.lstm = nn.LSTM(32, hidden)
        self.readout = nn.Linear(hidden, letters)

    def core(self, letters, state):
        """Carry the state."""
        return self.lstm(self.embedding(letters), state)

    def head(self, features):
        """Read it out; run only where there are losses."""
        return self.readout(features)


def loss_fn(logits, targets):
    """Cross entropy in nats, the mean over time and batch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


# %% [markdown]
# ## Train
#
# `losses=20` makes an update every 20 characters, as a loop that detaches the state every 20 steps
# does. `delta=0.1` asks for as much context before each window as keeps the bias of its gradient
# below a tenth. `k_min=0` allows no context at all. K is measured three times per epoch.

# %%
torch.manual_seed(0)
model = Characters(len(letters))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
tolerance = at.BiasTolerance(delta=0.1, k_min=0, k_max=64, lags=128)
tbptt = at.AdaptiveTBPTT(model, loss_fn, tolerance, losses=20, estimates_per_epoch=3)
losses = []
for epoch in range(5):
    for window in tbptt.windows(train):
        loss = window.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(at.evaluate(model, loss_fn, valid))
    print(f"epoch {epoch + 1}  validation {losses[-1]:.3f} nats  K {tbptt.k}", flush=True)
print(tbptt.history[-1].message)

# %% [markdown]
# ## What K did

# %%
figure = Figure(figsize=(7.0, 5.0), layout="constrained")
top, bottom = figure.subplots(2, 1, sharex=True)
epochs = [estimate.step / cut for estimate in tbptt.history]
top.step(epochs, [e.k for e in tbptt.history], color=BLUE, where="post", marker="o", ms=4)
top.set_ylabel("truncation length K (steps)")
top.set_title("What delta = 0.1 asks for, and the bias that is left")
top.set_ylim(-0.5, max(8.5, 1.2 * max(e.k for e in tbptt.history)))
bottom.plot(epochs, [e.relative_bias for e in tbptt.history], "o", color=BLUE)
bottom.axhline(0.1, color=ORANGE, ls="--")
bottom.text(0, 0.105, "tolerated: delta = 0.1", color=ORANGE)
bottom.set_ylim(bottom=0)
bottom.set_ylabel("measured relative bias (ratio)")
bottom.set_xlabel("epochs")
OUT.mkdir(parents=True, exist_ok=True)
figure.savefig(OUT / "tutorial-text.png", dpi=130)

# %% [markdown]
# ![K and the measured bias during training](../img/tutorial-text.png)
#
# In the first two epochs windows of 20 losses miss 2 to 7 % of the gradient, so they need no
# context. Then one step is needed. As the loss falls the mean gradient gets small beside its noise:
# most of the later estimates leave the answer open, and K stays at one step. The measured bias of
# such an estimate, as the last one here, says little. Your own text may need more context.
#
# ## Let it write

# %%
with torch.no_grad():
    features, state = model.core(inputs[cut : cut + 100, :1], None)  # read a little first
    written = ""
    for _ in range(240):
        chances = (model.head(features)[-1, 0] / 0.6).softmax(0)
        letter = torch.multinomial(chances, 1)
        written += letters[int(letter)]
        features, state = model.core(letter.view(1, 1), state)
print(textwrap.fill(written, 80))

# %% [markdown]
# For words instead of characters, splits in files, the paper's model and checkpoints, there is
# `atbptt-paper train language --preset ptb-small --dataset text --data FOLDER --delta 0.1`
# ([command line](../command-line.md#data)).

# %% [check]
assert losses[-1] < losses[0]
