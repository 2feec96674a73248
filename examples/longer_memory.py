"""A detach loop and the recommended loop side by side, at equal processor time.

A symbol is shown, 60 blanks follow, then the model is asked which symbol it was. A loop that
detaches the state every 35 steps never sees a question and its symbol in one window, so its
gradient does not tell the model to remember. The other loop is told nothing about the 60 steps.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import adaptive_tbptt as at

SYMBOLS, LAG, ROWS = 8, 60, 32
ASK, BLANK = SYMBOLS, SYMBOLS + 1


def recall(steps: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets `(steps, rows)`; only the step of a question has a target."""
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.full((steps, ROWS), BLANK)
    targets = torch.full((steps, ROWS), -100)
    for row in range(ROWS):
        step = int(torch.randint(LAG, (), generator=rng))
        while step + LAG < steps:
            symbol = int(torch.randint(SYMBOLS, (), generator=rng))
            inputs[step, row], inputs[step + LAG, row] = symbol, ASK
            targets[step + LAG, row] = symbol
            step += LAG + int(torch.randint(10, 30, (), generator=rng))
    return inputs, targets


class Model(nn.Module):
    """An LSTM that starts with time scales of 1 to 100 steps.

    The initialisation is that of Tallec and Ollivier, *Can recurrent neural networks warp time?*
    (2018), for both loops.
    """

    def __init__(self, units: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS + 2, units)
        self.lstm = nn.LSTM(units, units)
        self.readout = nn.Linear(units, SYMBOLS)
        scales = torch.empty(units).uniform_(1.0, 99.0).log()
        with torch.no_grad():
            self.lstm.get_parameter("bias_hh_l0").zero_()
            bias = self.lstm.get_parameter("bias_ih_l0")
            bias[:units], bias[units : 2 * units] = -scales, scales

    def forward(
        self, inputs: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return logits and state."""
        hidden, state = self.lstm(self.embedding(inputs), state)
        return self.readout(hidden), state


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over the questions; 0 if there is none."""
    if not (targets >= 0).any():
        return outputs.sum() * 0.0
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clip and update."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def detach_loop(
    model: Model, optimizer: torch.optim.Optimizer, data: tuple[Tensor, Tensor]
) -> Iterator[None]:
    """The loop that people write; yields after every update."""
    inputs, targets = data
    while True:
        state = None
        for i in range(0, len(inputs), 35):
            outputs, state = model(inputs[i : i + 35], state)
            loss_fn(outputs, targets[i : i + 35]).backward()
            state = (state[0].detach(), state[1].detach())
            step(model, optimizer)
            yield


def recommended_loop(
    model: Model, optimizer: torch.optim.Optimizer, data: tuple[Tensor, Tensor]
) -> Iterator[None]:
    """The same with this library; yields after every update."""
    stream = at.SequenceStream(*data)
    tbptt = at.AdaptiveTBPTT(model, loss_fn)
    while True:
        for window in tbptt.windows(stream):
            window.backward()
            step(model, optimizer)
            yield


def recalled(model: Model, data: tuple[Tensor, Tensor]) -> float:
    """Return the fraction of questions that are answered right."""
    inputs, targets = data
    with torch.no_grad():
        found = model(inputs)[0].argmax(-1)
    return float((found == targets).sum() / (targets >= 0).sum())


Loop = Callable[[Model, torch.optim.Optimizer, tuple[Tensor, Tensor]], Iterator[None]]
LOOPS: dict[str, Loop] = {
    "detach every 35 steps": detach_loop,
    "adaptive_tbptt": recommended_loop,
}


def compare(seconds: float, looks: int, seed: int = 0) -> dict[str, list[tuple[float, float]]]:
    """Train both in turn, a slice of processor time each; return (seconds, recalled) by name."""
    train, valid = recall(20_000, seed=1), recall(1_000, seed=2)
    running, curves = {}, {}
    for name, loop in LOOPS.items():
        torch.manual_seed(seed)
        model = Model()
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        running[name] = model, loop(model, optimizer, train)
        curves[name] = [(0.0, recalled(model, valid))]
    for look in range(looks):
        for name, (model, updates) in running.items():
            used, due = curves[name][-1][0], seconds * (look + 1) / looks
            began = time.process_time()
            while used + (passed := time.process_time() - began) < due:
                next(updates)
            curves[name].append((used + passed, recalled(model, valid)))
        line = ", ".join(f"{name} {curve[-1][1]:.0%}" for name, curve in curves.items())
        print(f"{seconds * (look + 1) / looks:5.1f} s each: recalled {line}", flush=True)
    return curves


def draw(curves: dict[str, list[tuple[float, float]]], path: Path) -> None:
    """Draw what is recalled against time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for (name, curve), color in zip(curves.items(), ("0.45", "#d55e00"), strict=True):
        x, y = zip(*curve, strict=True)
        axes.plot(x, [100 * v for v in y], color=color, lw=2)
        axes.annotate(name, (x[-1], 100 * y[-1]), (-4, 7), textcoords="offset points", ha="right")
        axes.texts[-1].set_color(color)
    axes.axhline(100 / SYMBOLS, color="0.7", lw=1, ls=":")
    axes.set(
        xlabel="processor time in seconds",
        ylabel="symbols recalled, in %",
        title=f"Recall a symbol seen {LAG} steps ago",
        ylim=(0, 110),
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Compare, draw, and say what came out."""
    parser = argparse.ArgumentParser(description="A detach loop and ours at equal processor time.")
    parser.add_argument("--seconds", type=float, default=25.0, help="processor time of each loop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/quick"))
    options = parser.parse_args()
    torch.set_num_threads(1)  # so that processor time is comparable
    curves = compare(options.seconds, 15, options.seed)
    draw(curves, options.out / "side_by_side.png")
    first, second = curves.values()
    chance = 1 / SYMBOLS
    print(
        f"After {options.seconds:g} seconds of processor time each, the loop that detaches every "
        f"35 steps recalls {first[-1][1]:.0%} of the symbols seen {LAG} steps ago (guessing: "
        f"{chance:.0%}), and adaptive_tbptt {second[-1][1]:.0%}. "
        f"Picture: {options.out / 'side_by_side.png'}"
    )


if __name__ == "__main__":
    main()
