"""What is timed, and against what. Contenders take turns, so that noise falls on all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adaptive_tbptt import AdaptiveTBPTT, BiasTolerance, FixedTruncation, SequenceStream
from adaptive_tbptt.estimate import levels_up_to
from adaptive_tbptt.measure import LagRequest, LevelRequest, ProbeSettings, Source
from adaptive_tbptt.measure.lag_probe import probe_segment
from adaptive_tbptt.model import Objective
from adaptive_tbptt.train.provenance import commit
from atbptt_paper.tasks.language_task import LanguageModel
from atbptt_paper.tasks.sequence_model import SymbolModel, symbol_loss


@dataclass(frozen=True)
class Size:
    """A model and the data it is timed on.

    Attributes:
        name: what the table calls it.
        hidden: units.
        layers: layers.
        symbols: size of the alphabet or vocabulary.
        rows: batch size.
        lags: R, the lags of a probe.
        ks: truncation lengths for training.
        windows: number of windows to train on.
        epoch: steps of an epoch; 0 where a whole one takes too long.
    """

    name: str
    hidden: int
    layers: int
    symbols: int
    rows: int
    lags: int
    ks: tuple[int, ...]
    windows: int
    epoch: int

    def model(self) -> nn.Module:
        """Return the model: the copy task's for small alphabets, the language model for others."""
        if self.symbols < 100:
            return SymbolModel(self.symbols, self.hidden, self.layers)
        return LanguageModel(self.symbols, self.hidden, self.layers, dropout=0.0)

    def stream(self, steps: int) -> SequenceStream:
        """Return random symbols."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(self.symbols, (steps, self.rows), generator=generator)
        return SequenceStream(x, x.roll(1, 0))


SIZES = {
    "smoke": Size("smoke", 8, 1, 6, 4, 20, (5,), 10, 200),
    "copy": Size("copy", 50, 2, 6, 64, 100, (10, 30), 40, 4000),
    "ptb-small": Size("ptb-small", 128, 1, 8069, 16, 400, (10, 50, 100), 20, 10_000),
    "ptb": Size("ptb", 900, 1, 10_000, 32, 400, (10, 50, 100), 5, 0),
}


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender: the least and the median of its turns.

    Attributes:
        benchmark: what is timed.
        size: of the model, or the point of a sweep.
        contender: who is timed.
        least: seconds of the best turn.
        median: seconds of the median turn.
        turns: how many there were.
        tokens: steps times rows that were trained on; 0 where nothing is trained.
        commit: of the code.
    """

    benchmark: str
    size: str
    contender: str
    least: float
    median: float
    turns: int
    tokens: int = 0
    commit: str = ""


def take_turns(
    benchmark: str, size: str, contenders: dict[str, Callable[[], Any]], turns: int, tokens: int = 0
) -> list[Timing]:
    """Run every contender once to warm up, then in turns; five times as many if they are quick."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}

    def round_of_turns() -> float:
        began = time.perf_counter()
        for name, call in contenders.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
        return time.perf_counter() - began

    if round_of_turns() < 2.0:
        turns *= 5
    for kept in seconds.values():
        kept.clear()
    for _ in range(turns):
        round_of_turns()
    return [
        Timing(benchmark, size, name, min(s), statistics.median(s), turns, tokens, commit())
        for name, s in seconds.items()
    ]


def bench_probe(size: Size, turns: int) -> list[Timing]:
    """One profile: ours, per step by autograd, one fused pass, and the bare products."""
    model: Any = size.model()
    objective = Objective.of(model, symbol_loss)
    segment = size.stream(size.lags).segment(0, size.lags)
    return take_turns(
        "probe",
        size.name,
        {
            "ours": lambda: probe_segment(objective, segment, settings=ProbeSettings()),
            "ours, general path": lambda: probe_segment(
                objective, segment, settings=ProbeSettings(fused=False)
            ),
            "per step by hand": lambda: probe_by_hand(model, segment.inputs, segment.targets),
            "one fused pass": lambda: one_pass(model, segment.inputs, segment.targets),
            "bare products": lambda: products(size, size.lags, 3),
        },
        turns,
    )


def bench_gauges(size: Size, turns: int) -> list[Timing]:
    """What the measured gauge costs: a window by level against a probe of the state norms."""
    objective = Objective.of(size.model(), symbol_loss)
    stream = size.stream(size.lags + 10)

    def source() -> Source:
        return Source(objective, stream, 0, torch.Generator().manual_seed(0))

    contexts = levels_up_to(size.lags)
    contenders = {
        "ours": lambda: LevelRequest(contexts, losses=10, segments=1).measure(source()),
        "state norms": lambda: LagRequest(size.lags).measure(source()),
    }
    return take_turns("measured bias", size.name, contenders, turns)


def bench_training(size: Size, turns: int) -> list[Timing]:
    """Some windows of BPTT(2K, K) for several K."""
    timings = []
    for k in size.ks:
        contenders = training_contenders(size, size.windows * k, k)
        tokens = size.windows * k * size.rows
        timings += take_turns("training", f"{size.name}, K={k}", contenders, turns, tokens)
    return timings


def training_contenders(size: Size, steps: int, k: int) -> dict[str, Callable[[], Any]]:
    """Return one epoch by us, by a plain loop with the same gradient, and the bare products."""
    model: Any = size.model()
    stream = size.stream(steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tbptt = AdaptiveTBPTT(model, symbol_loss, FixedTruncation(k))
    return {
        "ours": lambda: train_epoch(tbptt, stream, optimizer),
        "plain loop": lambda: plain_loop(model, stream, optimizer, k),
        "bare products": lambda: products(size, 2 * steps, 3),
    }


def train_epoch(tbptt: AdaptiveTBPTT, stream: SequenceStream, optimizer: Any) -> None:
    """Train one epoch as a person's own loop would."""
    for window in tbptt.windows(stream):
        window.backward()
        optimizer.step()
        optimizer.zero_grad()


def bench_adaptivity(size: Size, turns: int) -> list[Timing]:
    """One epoch at the same K, with the paper's one estimate and without."""
    if size.epoch == 0:
        return []
    model: Any = size.model()
    stream = size.stream(size.epoch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    k = size.ks[-1]  # the largest: an epoch is cheapest there, and a probe costs the same
    options: dict[str, Any] = {"k_min": k, "k_max": k, "lags": size.lags}

    def epoch(controller: Any) -> None:
        train_epoch(AdaptiveTBPTT(model, symbol_loss, controller), stream, optimizer)

    contenders = {
        "adaptive": lambda: epoch(BiasTolerance(delta=0.999, **options)),
        "fixed": lambda: epoch(FixedTruncation(k)),
        "bare products": lambda: products(size, 2 * size.epoch, 3),
    }
    tokens = size.epoch * size.rows
    return take_turns("adaptivity", f"{size.name}, K={k}", contenders, turns, tokens)


def probe_by_hand(model: Any, x: Tensor, y: Tensor) -> list[Tensor]:
    """A probe as a person would write it: step by step, keep every state, one backward pass."""
    state = None
    states: list[Tensor] = []
    for t in range(len(x)):
        out, state = model(x[t : t + 1], state)
        for leaf in state if isinstance(state, tuple) else (state,):
            leaf.retain_grad()
            states.append(leaf)
    symbol_loss(out, y[-1:]).backward()
    model.zero_grad()
    return [leaf.grad.norm(dim=-1) for leaf in states[:-1] if leaf.grad is not None]


def one_pass(model: Any, x: Tensor, y: Tensor) -> None:
    """One forward and one backward pass of the fused layer over the window."""
    features, _ = model.core(x, None)
    symbol_loss(model.head(features[-1:]), y[-1:]).backward()
    model.zero_grad()


def plain_loop(model: Any, stream: SequenceStream, optimizer: Any, k: int) -> None:
    """BPTT(2K, K) as in circulation: head and loss everywhere, the first half masked out."""
    state: Any = None
    length = len(stream)
    for first in range(0, length, k):
        start = max(first - k, 0)
        inputs, targets, *_ = stream.segment(start, min(first + k, length))
        context = first - start
        parts = []
        if context:
            features, state = model.core(inputs[:context], state)
            parts.append(features)
        features, _ = model.core(inputs[context:], state)
        out = model.head(torch.cat([*parts, features]))
        losses = nn.functional.cross_entropy(
            out.flatten(0, -2), targets.flatten(), reduction="none"
        ).view(targets.shape)
        losses[context:].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = None if state is None else tuple(leaf.detach() for leaf in state)


def products(size: Size, steps: int, passes: int) -> None:
    """The matrix products of the recurrence alone, one step at a time."""
    rows, hidden = size.rows, size.hidden
    h, w = torch.zeros(rows, hidden), torch.zeros(hidden, 4 * hidden)
    x = torch.zeros(steps * rows, hidden)
    for _ in range(passes * size.layers):
        torch.mm(x, w)
        for _ in range(steps):
            torch.mm(h, w)


BENCHMARKS: dict[str, Callable[[Size, int], list[Timing]]] = {
    "probe": bench_probe,
    "gauges": bench_gauges,
    "training": bench_training,
    "adaptivity": bench_adaptivity,
}
