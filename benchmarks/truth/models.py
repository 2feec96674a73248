"""Models and data of the kinds people have, none of them made for this library."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, STEPS = 16, 2400


@dataclass(frozen=True)
class Case:
    """A model with its data and its loop.

    Attributes:
        model: makes it, at its initial parameters.
        data: makes `(inputs, targets, resets)`, time first.
        loss: of outputs and targets.
        losses: steps per window of its training loop.
        rate: learning rate of Adam.
        epochs: of training.
        mean: whether the loss is a mean over time and batch, so that windows may be joined as rows.
    """

    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Any, Any, Tensor | None]]
    loss: Callable[[Any, Any], Tensor]
    losses: int
    rate: float = 3e-3
    epochs: int = 3
    mean: bool = True


class Readout(nn.Module):
    """A recurrent layer and a linear map, called as (x, state) -> (outputs, state)."""

    def __init__(self, layer: nn.Module, hidden: int, outputs: int) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(hidden, outputs)

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        h, state = self.layer(x, state)
        return self.out(h), state


# Language -----------------------------------------------------------------------------------------


class Words(nn.Module):
    """A word-level LSTM."""

    def __init__(self, words: int = 1000, size: int = 64) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(words, size), nn.LSTM(size, size)
        self.out = nn.Linear(size, words)

    def forward(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        h, state = self.lstm(self.embed(tokens), state)
        return self.out(h), state


def words() -> tuple[Tensor, Tensor, None]:
    """The most frequent 999 words of Penn Treebank, the rest as one."""
    folder = os.environ.get("ADAPTIVE_TBPTT_DATA")
    if folder is None:
        raise FileNotFoundError("set ADAPTIVE_TBPTT_DATA to the folder that holds ptb/")
    text = next((Path(folder) / "ptb").glob("*train*")).read_text().split()
    counts: dict[str, int] = {}
    for word in text:
        counts[word] = counts.get(word, 0) + 1
    index = {w: i + 1 for i, w in enumerate(sorted(counts, key=lambda w: -counts[w])[:999])}
    tokens = torch.tensor([index.get(w, 0) for w in text[: ROWS * STEPS + 1]])
    rows = tokens[:-1].view(ROWS, STEPS).t().contiguous()
    following = tokens[1:].view(ROWS, STEPS).t().contiguous()
    return rows, following, None


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over time and batch."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


# Regression with long memory ----------------------------------------------------------------------


def delayed(lag: int = 30) -> tuple[Tensor, Tensor, None]:
    """Recall a noisy input after a delay."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS, ROWS, 1, generator=g)
    y = 0.5 * torch.roll(x, 3, 0) + torch.roll(x, lag, 0)
    return x, y, None


# Audio --------------------------------------------------------------------------------------------


def amplifier() -> tuple[Tensor, Tensor, None]:
    """A distorted, slowly compressing signal chain."""
    g = torch.Generator().manual_seed(1)
    time = torch.arange(STEPS)[:, None] / 100.0
    tone = torch.rand(ROWS, generator=g) * 8 + 1
    x = torch.sin(2 * math.pi * tone * time) * torch.rand(1, ROWS, generator=g)
    x = x + 0.1 * torch.randn(STEPS, ROWS, generator=g)
    level, out = torch.zeros(ROWS), []
    for sample in x:
        level = 0.98 * level + 0.02 * sample.abs()
        out.append(torch.tanh(4 * sample / (0.3 + 3 * level)))
    return x[..., None], torch.stack(out)[..., None], None


def error_to_signal(outputs: Tensor, targets: Tensor) -> Tensor:
    """ESR of the whole window: not a mean over time."""
    return (targets - outputs).square().sum() / (targets.square().sum() + 1e-5)


# Gated linear recurrence --------------------------------------------------------------------------


class MinGRU(nn.Module):
    """minGRU (Feng et al., 2024): gate and candidate depend on the input alone."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.candidate = nn.Linear(inputs, hidden), nn.Linear(inputs, hidden)
        self.hidden = hidden

    def forward(self, x: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
        h = x.new_zeros(x.shape[1], self.hidden) if h is None else h
        z, c = torch.sigmoid(self.gate(x) - 2.0), self.candidate(x)
        out = []
        for zt, ct in zip(z, c, strict=True):
            h = h + zt * (ct - h)
            out.append(h)
        return torch.stack(out), h


# State-space --------------------------------------------------------------------------------------


class DiagonalSSM(nn.Module):
    """A diagonal complex state-space layer, as in S4D and LRU."""

    def __init__(self, inputs: int, states: int, hidden: int) -> None:
        super().__init__()
        self.log_decay = nn.Parameter(torch.linspace(-4.0, -0.7, states))
        self.angle = nn.Parameter(torch.linspace(0.0, 3.0, states))
        self.b = nn.Parameter(torch.randn(inputs, states, 2) / inputs**0.5)
        self.c = nn.Parameter(torch.randn(states, hidden, 2) / states**0.5)
        self.skip = nn.Linear(inputs, hidden)

    def forward(self, x: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
        decay = torch.exp(torch.complex(-torch.exp(self.log_decay), self.angle))
        b, c = torch.view_as_complex(self.b), torch.view_as_complex(self.c)
        if h is None:
            h = x.new_zeros(x.shape[1], len(self.angle), dtype=torch.complex64)
        driven, out = x.to(b.dtype) @ b, []
        for u in driven:
            h = decay * h + u
            out.append((h @ c).real)
        return F.gelu(torch.stack(out) + self.skip(x)), h


class Mamba(nn.Module):
    """A selective state-space block in plain PyTorch: step sizes and matrices from the input."""

    def __init__(self, inputs: int, width: int = 16, states: int = 4) -> None:
        super().__init__()
        self.into = nn.Linear(inputs, 2 * width)
        self.select = nn.Linear(width, 1 + 2 * states)
        self.step = nn.Linear(1, width)
        self.log_a = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(width, 1))
        self.d, self.norm = nn.Parameter(torch.ones(width)), nn.LayerNorm(width)
        self.width, self.states = width, states

    def forward(self, x: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
        u, gate = self.into(x).chunk(2, -1)
        step, b, c = self.select(F.silu(u)).split([1, self.states, self.states], -1)
        step = F.softplus(self.step(step) - 3.0)
        if h is None:
            h = x.new_zeros(x.shape[1], self.width, self.states)
        a, out = -torch.exp(self.log_a), []
        for ut, dt, bt, ct in zip(u, step, b, c, strict=True):
            h = h * torch.exp(dt[..., None] * a) + (dt * ut)[..., None] * bt[:, None]
            out.append((h * ct[:, None]).sum(-1) + self.d * ut)
        return self.norm(torch.stack(out)) * F.silu(gate), h


class SLSTM(nn.Module):
    """An sLSTM cell with exponential gates, a normaliser and a stabiliser (xLSTM), state a dict."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(inputs, 4 * hidden), nn.Linear(hidden, 4 * hidden, bias=False)
        self.hidden = hidden

    def forward(self, x: Tensor, s: dict[str, Tensor] | None) -> tuple[Tensor, dict[str, Tensor]]:
        if s is None:
            zero = x.new_zeros(x.shape[1], self.hidden)
            s = {"h": zero, "c": zero, "n": zero, "m": zero}
        h, c, n, m, out = s["h"], s["c"], s["n"], s["m"], []
        for xt in self.x(x):
            z, i, f, o = (xt + self.h(h)).chunk(4, -1)
            f = F.logsigmoid(f + 2.0)
            new = torch.maximum(f + m, i)
            inward, kept = torch.exp(i - new), torch.exp(f + m - new)
            c, n, m = kept * c + inward * torch.tanh(z), kept * n + inward, new
            h = torch.sigmoid(o) * c / n.clamp_min(1e-6)
            out.append(h)
        return torch.stack(out), {"h": h, "c": c, "n": n, "m": m}


# Hydrology ----------------------------------------------------------------------------------------


class Catchment(nn.Module):
    """An LSTM with static inputs beside the weather."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(3 + 4, 20), nn.Linear(20, 1)

    def forward(self, x: dict[str, Tensor], state: Any) -> tuple[Tensor, Any]:
        h, state = self.lstm(torch.cat([x["weather"], x["static"]], -1), state)
        return self.out(h), state


def runoff() -> tuple[dict[str, Tensor], Tensor, None]:
    """A fast and a slow reservoir per catchment, fed by intermittent rain."""
    g = torch.Generator().manual_seed(2)
    static = torch.rand(ROWS, 4, generator=g)
    rain = torch.rand(STEPS, ROWS, generator=g).pow(6) * 10
    season = torch.sin(torch.arange(STEPS) / 58.0)[:, None].expand(-1, ROWS)
    noise = torch.randn(STEPS, ROWS, generator=g)
    fast, slow, flow = torch.zeros(ROWS), torch.zeros(ROWS), []
    for r, s in zip(rain, season, strict=True):
        wet = (r - 0.3 - 0.2 * s).clamp_min(0)
        fast = fast * (0.6 + 0.2 * static[:, 0]) + wet * static[:, 1]
        slow = slow * (0.96 + 0.03 * static[:, 2]) + wet * (1 - static[:, 1])
        flow.append(0.3 * fast + 0.03 * slow)
    flow = torch.stack(flow)
    weather = torch.stack([rain / 3, season, 0.3 * noise], -1)
    x = {"weather": weather, "static": static.expand(STEPS, -1, -1).contiguous()}
    return x, ((flow - flow.mean(0)) / flow.std(0))[..., None], None


# Agents -------------------------------------------------------------------------------------------


class Agent(nn.Module):
    """A recurrent actor and critic."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 32)
        self.actor, self.critic = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, x: Tensor, state: Any) -> tuple[tuple[Tensor, Tensor], Any]:
        h, state = self.gru(x, state)
        return (self.actor(h), self.critic(h)[..., 0]), state


def tmaze(agent: Agent | None = None, environments: int = 64, steps: int = 400) -> Any:
    """Roll an agent out in a T-maze: a cue at the start says which way to turn at the end.

    Returns `(observations, targets, resets)`: targets are actions, log probabilities, advantages
    and returns by generalised advantage estimation.
    """
    g = torch.Generator().manual_seed(3)
    torch.manual_seed(3)
    agent = Agent() if agent is None else agent
    place = torch.zeros(environments, dtype=torch.long)
    length = torch.randint(6, 13, (environments,), generator=g)
    cue = torch.randint(2, (environments,), generator=g)
    fresh, state = torch.ones(environments, dtype=torch.bool), None
    kept: dict[str, list[Tensor]] = {n: [] for n in ("x", "a", "p", "v", "r", "new")}
    with torch.no_grad():
        for _ in range(steps):
            at_start, at_end = (place == 0).float(), (place == length).float()
            x = torch.stack(
                [at_start * (2 * cue - 1), at_start, at_end, torch.ones_like(at_end)], 1
            )
            if state is not None:
                state = torch.where(fresh[None, :, None], torch.zeros_like(state), state)
            (logits, value), state = agent(x[None], state)
            policy = torch.distributions.Categorical(logits=logits[0])
            action = policy.sample()
            right = (action - 1 == cue) & (place == length)
            wrong = (action > 0) & ~right
            reward = right.float() * 4.0 - 0.1 * wrong.float()
            for name, item in (("x", x), ("a", action), ("p", policy.log_prob(action)),
                               ("v", value[0]), ("r", reward), ("new", fresh)):  # fmt: skip
                kept[name].append(item)
            done = (place == length) & (action > 0)
            place = torch.where(done, 0, torch.minimum(place + (action == 0), length))
            length = torch.where(done, torch.randint(6, 13, length.shape, generator=g), length)
            cue = torch.where(done, torch.randint(2, cue.shape, generator=g), cue)
            fresh = done
    x, a, p, v, r, new = (torch.stack(kept[n]) for n in ("x", "a", "p", "v", "r", "new"))
    advantage, running = torch.zeros_like(v), torch.zeros(environments)
    for t in reversed(range(steps - 1)):
        alive = 1.0 - new[t + 1].float()
        delta = r[t] + 0.98 * alive * v[t + 1] - v[t]
        running = delta + 0.98 * 0.95 * alive * running
        advantage[t] = running
    return x, {"a": a, "p": p, "adv": advantage, "ret": advantage + v}, new


def ppo(outputs: tuple[Tensor, Tensor], y: dict[str, Tensor]) -> Tensor:
    """CleanRL's loss; advantages are normalised over the window, so it is no mean over time."""
    logits, value = outputs
    policy = torch.distributions.Categorical(logits=logits)
    advantage = (y["adv"] - y["adv"].mean()) / (y["adv"].std() + 1e-8)
    ratio = (policy.log_prob(y["a"]) - y["p"]).exp()
    policy_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
    value_loss = 0.5 * (value - y["ret"]).square().mean()
    return policy_loss - 0.01 * policy.entropy().mean() + 0.5 * value_loss


CASES: dict[str, Case] = {
    "word LSTM": Case(Words, words, cross_entropy, 35),
    "GRU, delayed recall": Case(
        lambda: Readout(nn.GRU(1, 32), 32, 1), delayed, F.mse_loss, 20, epochs=4
    ),
    "PPO agent (T-maze)": Case(Agent, tmaze, ppo, 16, rate=1e-3, epochs=6, mean=False),
    "amplifier LSTM, ESR": Case(
        lambda: Readout(nn.LSTM(1, 16), 16, 1), amplifier, error_to_signal, 32, mean=False
    ),
    "minGRU": Case(lambda: Readout(MinGRU(1, 24), 24, 1), delayed, F.mse_loss, 20),
    "diagonal state space": Case(
        lambda: Readout(DiagonalSSM(1, 16, 16), 16, 1), delayed, F.mse_loss, 20
    ),
    "Mamba block": Case(lambda: Readout(Mamba(1), 16, 1), delayed, F.mse_loss, 20),
    "xLSTM cell (sLSTM)": Case(lambda: Readout(SLSTM(1, 16), 16, 1), delayed, F.mse_loss, 20),
    "rainfall-runoff LSTM": Case(Catchment, runoff, F.mse_loss, 30),
}
