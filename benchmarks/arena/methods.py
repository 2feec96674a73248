"""How each method cuts the stream into windows. Every comparator in its authors' form.

A method is made for one cell. `next_plan` says what the coming window is. Methods that look at
gradients by level, and the library's own loop, take the update over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor, nn

import adaptive_tbptt as at

from .engine import Carried, Plan, run_levels, run_window


class Method:
    """One way to train; the base class is the loop around `next_plan`.

    Attributes:
        reach: how far back a window may start.
        losses: typical steps with a loss per update, for the learning rate.
    """

    reach = 0
    losses: float = 35

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def next_plan(self, done: float) -> Plan:
        """Return the next window, with the fraction of the budget that is used."""
        raise NotImplementedError

    def about(self) -> dict[str, Any]:
        """Return what a cell should keep about the run."""
        return {}

    def update(
        self, task: Any, model: Any, optimizer: Any, carried: Carried, first: int, done: float
    ) -> int:
        """Train on one window; return the step after it."""
        plan = self.next_plan(done)
        loss = run_window(task, model, carried, first, plan)
        (loss * plan.share).backward()
        apply(task, model, optimizer, plan.rate)
        return min(first + plan.losses, len(task.train[0]))


def apply(task: Any, model: Any, optimizer: Any, rate: float = 1.0) -> None:
    """Clip, step with a factor on the rate, and clear the gradient."""
    nn.utils.clip_grad_norm_(model.parameters(), task.clip)
    for group in optimizer.param_groups:
        group["lr"] *= rate
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] /= rate
    optimizer.zero_grad()


def add_up(model: Any, found: list[list[Tensor | None]], weights: Any) -> None:
    """Put the weighted sum of all levels into `.grad`."""
    for i, p in enumerate(model.parameters()):
        parts = [
            gradient[i] * float(w)
            for gradient, w in zip(found, weights, strict=True)
            if gradient[i] is not None
        ]
        # Contiguous: fused optimisers ignore the strides of a gradient.
        p.grad = sum(parts[1:], parts[0]).contiguous() if parts else None


class Fixed(Method):
    """The detach loop, or a fixed context; what people have."""

    def __init__(self, seed: int, losses: int, context: int = 0) -> None:
        super().__init__(seed)
        self.losses, self.reach = losses, context
        self._plan = Plan(losses, (context,) if context else ())

    def next_plan(self, done: float) -> Plan:
        """Always the same."""
        return self._plan


class Jitter(Method):
    """AWD-LSTM (Merity, Keskar, Socher 2018): length N(70, 5), in one of twenty half of it.

    The rate is scaled by the length. As in their release, a length is at least 5.
    """

    losses = 70

    def next_plan(self, done: float) -> Plan:
        """Draw a length."""
        base = 70 if self.rng.random() < 0.95 else 35
        length = max(5, int(self.rng.normal(base, 5)))
        return Plan(length, rate=length / 70)


class Growing(Method):
    """A length that doubles from 10 to 160 in five equal parts of the time."""

    losses = 35

    def next_plan(self, done: float) -> Plan:
        """Return the present length; the rate grows with its root, as for SGD above."""
        return Plan(10 * 2 ** min(int(5 * done), 4))


class ARTBP(Method):
    """Anticipated reweighted truncated backpropagation (Tallec and Ollivier 2017).

    After each step the sequence is cut with probability (alpha - 1) / ((alpha - 2) L0 + n), n steps
    after the last cut, which makes lengths of mean L0 with a heavy tail. Where it is not cut the
    gradient of the state is divided by the probability of that. Here cuts fall on multiples of five
    steps, so that torch's layers run at full speed; the probabilities of five steps are joined.
    """

    BLOCK, ALPHA, MEAN = 5, 4.0, 50.0
    losses = 50

    def next_plan(self, done: float) -> Plan:
        """Draw the coming stretch and the factors in it."""
        inner, length = [], 0
        while length < 1000:
            stays = 1.0
            for n in range(length, length + self.BLOCK):
                stays *= 1.0 - (self.ALPHA - 1) / ((self.ALPHA - 2) * self.MEAN + n)
            length += self.BLOCK
            if self.rng.random() > stays:
                break
            inner.append((length, 1.0 / stays))
        # Every loss counts the same, so the sum over a stretch counts, in units of the mean length.
        return Plan(length, inner=tuple(inner), share=length / self.MEAN)


class Telescope(Method):
    """Randomised telescopes, Russian roulette (Beatson and Adams 2019).

    Horizons are powers of two. From running means of squared norms of the differences between
    horizons the method keeps those that make (expected cost) x (expected squared norm) least,
    greedily removing or adding one at a time, with P(N >= j) as the root of squared norm by cost.
    As in the release costs are counted in steps, and a window now and then runs all horizons.
    """

    EVERY = 50

    def __init__(self, seed: int, losses: int, levels: tuple[int, ...]) -> None:
        super().__init__(seed)
        self.losses, self.reach = losses, losses * levels[-1]
        self.cuts = tuple(losses * level for level in levels)
        self.chances = np.ones(len(levels) + 1)
        self._all = (0, *self.cuts)
        self._norms: Any = None
        self._count = 0
        self._nodes = list(range(len(self._all)))
        self._factor = np.ones(len(self._all))

    def update(
        self, task: Any, model: Any, optimizer: Any, carried: Carried, first: int, done: float
    ) -> int:
        """Calibrate now and then; otherwise draw a horizon among those that are kept."""
        losses = int(self.losses)
        calibrate = self._norms is None or self._count % self.EVERY == 0
        self._count += 1
        draw = self.rng.random()
        reached = (
            len(self.cuts) if calibrate else max(j for j in self._nodes if draw < self.chances[j])
        )
        found = run_levels(task, model, carried, first, losses, self.cuts[:reached])
        if calibrate and len(found) == len(self._all):
            self._calibrate(found)
        weights = np.ones(reached + 1) if calibrate else self._weights(reached)
        add_up(model, found, weights[: len(found)])  # fewer near the data's start
        apply(task, model, optimizer)
        return min(first + losses, len(task.train[0]))

    def _weights(self, reached: int) -> Any:
        """Return the weight of every level: 1 / P of the first kept horizon that includes it."""
        weights = np.ones(reached + 1)
        for level in range(reached + 1):
            node = min(j for j in self._nodes if j >= level)
            weights[level] = 1.0 / self.chances[node]
        return weights

    def _calibrate(self, found: list[list[Tensor | None]]) -> None:
        count = len(self._all)
        norms = np.zeros((count, count))  # [i, j]: squared norm of levels i..j together
        for i in range(count):
            total: list[Tensor | None] = [None] * len(found[0])
            for j in range(i, count):
                for n, g in enumerate(found[j]):
                    if g is not None:
                        total[n] = g if total[n] is None else total[n] + g
                norms[i, j] = sum(float(g.square().sum()) for g in total if g is not None)
        self._norms = norms if self._norms is None else 0.9 * self._norms + 0.1 * norms
        everything = list(range(count))
        removed, added = self._greedy(everything, everything[:-1], True), [count - 1]
        added = self._greedy(added, everything[:-1], False)
        self._nodes = min((removed, added), key=self._cost)
        self.chances = np.zeros(count)
        for node, p in zip(self._nodes, self._tails(self._nodes), strict=True):
            self.chances[node] = p

    def _greedy(self, nodes: list[int], candidates: list[int], remove: bool) -> list[int]:
        best, improved = self._cost(nodes), True
        while improved:
            improved = False
            for node in candidates:
                if (node in nodes) == remove:
                    trial = sorted(set(nodes) ^ {node})
                    if self._cost(trial) < best:
                        nodes, best, improved = trial, self._cost(trial), True
                        break
        return nodes

    def _squares(self, nodes: list[int]) -> Any:
        starts = [0, *(n + 1 for n in nodes[:-1])]
        return np.array([self._norms[a, b] for a, b in zip(starts, nodes, strict=True)])

    def _costs(self, nodes: list[int]) -> Any:
        return np.diff([0.0, *(self.losses + self._all[n] for n in nodes)])

    def _tails(self, nodes: list[int]) -> Any:
        wanted = np.sqrt(self._squares(nodes) / self._costs(nodes))
        wanted = np.maximum.accumulate(wanted[::-1])[::-1]
        return wanted / max(wanted[0], 1e-30)

    def _cost(self, nodes: list[int]) -> float:
        tails = np.maximum(self._tails(nodes), 1e-12)
        return float((tails * self._costs(nodes)).sum() * (self._squares(nodes) / tails).sum())


class Library(Method):
    """The library's own loop with any of its controllers.

    Args:
        seed: of its draws.
        controller: made from the seed; None is the recommended one.
        losses: K2; None is K, or what is recommended.
        typical: losses of a typical window, for the learning rate; None is `losses`, or 10.
    """

    def __init__(
        self,
        seed: int,
        controller: Callable[[int], Any],
        losses: int | None = None,
        typical: int | None = None,
    ) -> None:
        super().__init__(seed)
        self.losses = typical or losses or 10
        self._seed, self._make, self._k2 = seed, controller, losses
        self._loop: Any = None
        self._windows: Any = iter(())
        self._contexts = self._updates = 0
        self._began: int | None = None

    def about(self) -> dict[str, Any]:
        """Every K that was chosen, by the step it was chosen at, and the mean context."""
        chosen = [(e.step, e.k) for e in self._loop.history]
        return {
            "k": chosen,
            "long_windows_from": self._began,
            "mean_context": self._contexts / max(self._updates, 1),
        }

    def update(
        self, task: Any, model: Any, optimizer: Any, carried: Carried, first: int, done: float
    ) -> int:
        """Train on the next window of the loop."""
        if self._loop is None:
            self._stream = at.SequenceStream(*task.train)
            self._loop = at.AdaptiveTBPTT(
                model,
                task.loss,
                self._make(self._seed),
                losses=self._k2,
                seed=self._seed,
            )
        window = next(self._windows, None)
        if window is None:
            self._windows = iter(self._loop.windows(self._stream))
            window = next(self._windows)
        window.backward()
        self._contexts += window.first - window.start
        if self._began is None and self._loop._tally.long.begun:
            self._began = self._loop.trained_steps
        self._updates += 1
        # SGD's rate is that of windows with `self.losses` losses, and grows with their root.
        scale = math.sqrt(window.rated_losses / self.losses) if task.sgd else 1.0
        apply(task, model, optimizer, scale)
        return int(window.stop)


def paper(seed: int) -> Any:
    """The paper's Algorithm 1 with the release's bound."""
    gauge = at.truncate.ReleaseGauge()
    return at.BiasTolerance(0.1, k_min=2, k_max=100, lags=100, k_init=10, gauge=gauge)


METHODS: dict[str, Callable[[int], Method]] = {
    "detach 10": lambda seed: Fixed(seed, 10),
    "detach 20": lambda seed: Fixed(seed, 20),
    "detach 35": lambda seed: Fixed(seed, 35),
    "detach 140": lambda seed: Fixed(seed, 140),
    "context 10": lambda seed: Fixed(seed, 10, 10),
    "context 35": lambda seed: Fixed(seed, 35, 35),
    "context 140": lambda seed: Fixed(seed, 140, 140),
    "jitter (AWD-LSTM)": Jitter,
    "growing": Growing,
    "ARTBP": ARTBP,
    "paper, delta 0.1": lambda seed: Library(seed, paper),
    "levels, delta 0.1, 35": lambda seed: Library(seed, lambda _: at.BiasTolerance(0.1), 35),
    "full": lambda seed: Fixed(seed, 10_000),
    "telescope": lambda seed: Telescope(seed, 35, (1, 2, 4, 8)),
    "unbiased, 35": lambda seed: Library(seed, lambda s: at.Unbiased(128, seed=s), 35),
    "ours": lambda seed: Library(seed, lambda _: None, typical=20),
}
