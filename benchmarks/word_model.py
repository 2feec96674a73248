"""What the whole curve costs at the size of a small word-level language model, on one thread.

Trains an LSTM of 64 units, nothing tied, on the first 200,000 words of Penn Treebank (20 rows), as
the paper's language experiments do with K = 50, then lets `diagnose` measure the bias of a loop
with 35 losses at all contexts up to 180 steps, several times. An epoch of that loop is timed beside
it, as the unit.

    python -m benchmarks.word_model --data FOLDER --out benchmarks/results/word-model
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import adaptive_tbptt as at
from adaptive_tbptt.train import origin
from atbptt_paper.tasks.sequence_model import release_init

from .truth.models import Words, cross_entropy

ROWS, LOSSES, LAGS = 20, 35, 180


def train(model: nn.Module, x: Tensor, y: Tensor, rate: float) -> tuple[float, float]:
    """Run one epoch as the paper's language experiments do, K = 50; return loss and seconds."""
    optimizer = torch.optim.SGD(model.parameters(), rate)
    loop, scale = at.AdaptiveTBPTT(model, cross_entropy, 50), at.StepScale(optimizer)
    clip = at.loop.Clip(1.0, per_loss=True)
    total, began = 0.0, time.process_time()
    for window in loop.windows(at.SequenceStream(x, y)):
        total += window.backward().item() * window.losses
        clip(model.parameters(), window.losses)
        scale.step(window)
        optimizer.step()
        optimizer.zero_grad()
    return total / len(x), time.process_time() - began


def detach_epoch(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the processor time of an epoch of the plain detach loop, without updates."""
    state, began = None, time.process_time()
    for i in range(0, len(x), LOSSES):
        outputs, state = model(x[i : i + LOSSES], state)
        cross_entropy(outputs, y[i : i + LOSSES]).backward()
        state = tuple(part.detach() for part in state)
        model.zero_grad()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with ptb's train.txt")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/word-model"))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rate", type=float, default=10.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    text = (given.data / "train.txt").read_text().replace("\n", " <eos> ").split()[:200_001]
    index = {word: i for i, word in enumerate(dict.fromkeys(text))}
    tokens = torch.tensor([index[word] for word in text])
    x, y = (part.view(ROWS, -1).t().contiguous() for part in (tokens[:-1], tokens[1:]))
    model = Words(len(index))
    release_init(model)
    epochs = [train(model, x, y, given.rate) for _ in range(given.epochs)]
    rows = []
    for seed, segments in enumerate((40, 40, 40, 160)):
        unit = detach_epoch(model, x, y)
        began = time.process_time()
        found = at.diagnose(
            model,
            cross_entropy,
            at.SequenceStream(x, y),
            losses=LOSSES,
            lags=LAGS,
            segments=segments,
            sampling=at.diagnosis.Sampling(seed=seed),
        )
        seconds = time.process_time() - began
        rows.append({**found.to_dict(), "seconds": seconds, "epoch": unit, "windows": segments})
        print(
            f"{seconds:.1f} s of processor time, an epoch takes {unit:.1f} s\n{found}", flush=True
        )
    given.out.mkdir(parents=True, exist_ok=True)
    kept = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "epochs": [{"loss": loss, "seconds": seconds} for loss, seconds in epochs],
        "diagnoses": rows,
        "origin": origin(),
    }
    (given.out / "found.json").write_text(json.dumps(kept, indent=1) + "\n")
    print("epochs (loss, seconds):", epochs)


if __name__ == "__main__":
    main()
