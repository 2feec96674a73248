"""How much the carried states, which older parameters made, change the gradient.

A streaming loop starts a window from a state that earlier windows left. The parameters have moved
since, so that state is not the one that the present parameters would give. Here windows of a
training run are backpropagated twice at the same parameters: from the carried state, and from a
state that the present parameters make, over the whole past of the stream or 500 steps of it.

    python -m benchmarks.drift --out benchmarks/results/drift
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adaptive_tbptt.train import origin

from .arena.engine import Carried, Plan, detached, run_window
from .arena.methods import apply
from .arena.tasks import TASKS

PAST, SAMPLES = 500, 60
# Steps of context: the detach loop, a fixed context, and the levels that a random one may draw.
CONTEXTS = (0, 20, 40, 80, 120)
RATES = {"copy": 4.5, "shakespeare": 0.004, "recall": 0.005}


def gradient(task: Any, model: Any, carried: Carried, first: int, context: int) -> Tensor:
    """Return the gradient of a window with 20 losses, as one vector."""
    plan = Plan(20, (context,) if context else ())
    loss = run_window(task, model, Carried(carried.reach, dict(carried.states)), first, plan)
    found = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([g.flatten() for g in found])


def fresh(task: Any, model: Any, step: int) -> Carried:
    """Return the state that the present parameters give at a step."""
    begin = max(0, step - PAST)
    with torch.no_grad():
        state = model.core(task.train[0][begin:step], None)[1] if step > begin else None
    return Carried(10**9, {step: detached(state)})


def measure(name: str, windows: int) -> list[tuple[int, float, float]]:
    """Train with windows of 20 losses; return (context, age in updates, drift) for every context.

    The drift is |E (g_carried - g_fresh)| / |E g_fresh|, the mean over windows of the run.
    """
    task = TASKS[name]
    model = task.model(0)
    optimizer = task.optimizer(model, RATES[name])
    carried, first, steps = Carried(CONTEXTS[-1]), 0, len(task.train[0])
    apart: dict[int, Any] = dict.fromkeys(CONTEXTS, 0.0)
    whole: dict[int, Any] = dict.fromkeys(CONTEXTS, 0.0)
    every = windows // SAMPLES
    for i in range(windows):
        if first + 20 > steps:
            carried.begin()
            first = 0
        if i % every == every - 1 and first >= CONTEXTS[-1]:
            for context in CONTEXTS:
                old = gradient(task, model, carried, first, context)
                new = gradient(task, model, fresh(task, model, first - context), first, context)
                apart[context] += old - new
                whole[context] += new
        run_window(task, model, carried, first, Plan(20)).backward()
        apply(task, model, optimizer)
        first += 20
    return [(c, 1 + c / 20, float(apart[c].norm() / whole[c].norm())) for c in CONTEXTS]


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=1800)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    found = {name: measure(name, options.windows) for name in RATES}
    lines = [
        f"Drift of the mean gradient over {SAMPLES} windows of {options.windows}, 20 losses each: "
        "|E (g from the carried state - g from the state of the present parameters)| / |E g|.",
        "",
        "| context | updates since the state was made | " + " | ".join(found) + " |",
        "|---" * (len(found) + 2) + "|",
    ]
    for i, context in enumerate(CONTEXTS):
        row = " | ".join(f"{rows[i][2]:.2%}" for rows in found.values())
        lines.append(f"| {context} | {1 + context // 20} | {row} |")
    made = ", ".join(f"{k} {v}" for k, v in origin().items() if k in ("torch", "commit"))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "README.md").write_text("\n".join([*lines, "", made]) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
