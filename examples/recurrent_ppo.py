"""Recurrent PPO on a T-maze: how far back does the agent learn, and how much history does it need?

A sign at the start of a corridor says which way to turn at its end, 4 to 8 steps later. An agent
without memory has a mean return of 0, a perfect one of 1. Run it with
`python examples/recurrent_ppo.py [--iterations N]`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import adaptive_tbptt as at

MAZES, STEPS = 32, 64  # rows and steps of a rollout
EPOCHS, MINIBATCHES = 4, 2
GAMMA, LAMBDA, CLIP, VALUE, ENTROPY = 0.95, 0.95, 0.2, 0.5, 0.01
SHORTEST, LONGEST = 4, 8  # corridors
LEARNING = 3  # iteration to diagnose at; once the agent is trained, its gradient is mostly noise


class TMaze:
    """Mazes side by side. A maze that ends starts anew at once, with another sign and length."""

    def __init__(self, rows: int) -> None:
        self.sign, self.left = torch.zeros(rows), torch.zeros(rows, dtype=torch.long)
        self.fresh = torch.ones(rows, dtype=torch.bool)  # where an episode begins with this step

    def observe(self) -> Tensor:
        """Return the sign, at the first step only, and whether it is the junction: `(rows, 2)`."""
        rows = len(self.fresh)
        self.sign = torch.where(self.fresh, torch.randint(2, (rows,)) * 2.0 - 1.0, self.sign)
        length = torch.randint(SHORTEST, LONGEST + 1, (rows,))
        self.left = torch.where(self.fresh, length, self.left)
        return torch.stack([self.sign * self.fresh, (self.left == 0).float()], dim=1)

    def step(self, action: Tensor) -> Tensor:
        """Walk on, or turn at the junction; return the reward, 1 or -1 for the turn, else 0."""
        ends = self.left == 0
        right = self.sign * (action * 2.0 - 1.0)
        self.left, self.fresh = self.left - 1, ends
        return right * ends


class Agent(nn.Module):
    """An LSTM with two readouts: the policy and the value of a state."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, hidden)
        self.actor, self.critic = nn.Linear(hidden, 2), nn.Linear(hidden, 1)

    def core(self, inputs: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Carry the state over `(time, batch, 2)`."""
        features, state = self.lstm(inputs, state)
        return features, state

    def head(self, features: Tensor) -> dict[str, Tensor]:
        """Read policy and value out."""
        return {"logits": self.actor(features), "value": self.critic(features)[..., 0]}

    def forward(self, inputs: Tensor, state: Any) -> tuple[dict[str, Tensor], Any]:
        """Run over time."""
        features, state = self.core(inputs, state)
        return self.head(features), state


def ppo_loss(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    """Evaluate PPO's loss of a whole window: advantages are normalised over its steps and rows."""
    policy = Categorical(logits=outputs["logits"])
    ratio = (policy.log_prob(targets["action"]) - targets["log_prob"]).exp()
    advantage = targets["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    surrogate = torch.min(advantage * ratio, advantage * clipped).mean()
    error = value_loss(outputs, targets)
    return -surrogate + VALUE * 0.5 * error - ENTROPY * policy.entropy().mean()


def value_loss(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    """Evaluate the error of the value alone: a mean over steps and rows, as `lookback` needs it."""
    return (outputs["value"] - targets["return"]).square().mean()


def policy_of(outputs: dict[str, Tensor]) -> Tensor:
    """Return the probabilities of the actions."""
    return outputs["logits"].softmax(dim=-1)


class Rollout:
    """Steps that the agent took, and the state it began them with.

    Attributes:
        inputs: `(steps, mazes, 2)`.
        targets: what `ppo_loss` needs, each `(steps, mazes)`.
        resets: where an episode begins.
        state: the state of the agent before the first step.
        final: the state after the last.
        mean_return: of the episodes that ended.
    """

    def __init__(self, agent: Agent, maze: TMaze, state: Any, steps: int = STEPS) -> None:
        rows, hidden = len(maze.fresh), agent.lstm.hidden_size
        if state is None:
            state = (torch.zeros(1, rows, hidden), torch.zeros(1, rows, hidden))
        self.state = state
        seen: dict[str, list[Tensor]] = {}
        with torch.no_grad():
            for _ in range(steps):
                fresh, inputs = maze.fresh, maze.observe()
                state = tuple(leaf * ~fresh[:, None] for leaf in state)
                outputs, state = agent(inputs[None], state)
                policy, value = Categorical(logits=outputs["logits"][0]), outputs["value"][0]
                action = policy.sample()
                found = {
                    "inputs": inputs,
                    "fresh": fresh,
                    "action": action,
                    "log_prob": policy.log_prob(action),
                    "value": value,
                    "reward": maze.step(action),
                }
                for name, part in found.items():
                    seen.setdefault(name, []).append(part)
            last = agent(maze.observe()[None], state)[0]["value"][0]
        kept = {name: torch.stack(parts) for name, parts in seen.items()}
        self.inputs, self.resets, self.final = kept["inputs"], kept["fresh"], state
        ends = torch.cat([self.resets[1:], maze.fresh[None]])  # after this step an episode is over
        self.mean_return = float(kept["reward"].sum() / ends.sum())
        advantage = advantages(kept["reward"], kept["value"], last, ends)
        self.targets = {
            "action": kept["action"],
            "log_prob": kept["log_prob"],
            "advantage": advantage,
            "return": advantage + kept["value"],
        }

    def stream(self, rows: Tensor | slice = slice(None)) -> at.SequenceStream:
        """Return some mazes of the rollout, from the state that the agent began it with."""
        targets = {name: part[:, rows] for name, part in self.targets.items()}
        state = tuple(leaf[:, rows] for leaf in self.state)
        return at.SequenceStream(self.inputs[:, rows], targets, self.resets[:, rows], state=state)


def advantages(reward: Tensor, value: Tensor, last: Tensor, ends: Tensor) -> Tensor:
    """Estimate advantages, `(steps, rows)`: generalised advantage estimation (GAE)."""
    found, after, following = [], torch.zeros_like(last), last
    for r, v, end in zip(reward.flip(0), value.flip(0), ends.flip(0), strict=True):
        delta = r + GAMMA * following * ~end - v
        after = delta + GAMMA * LAMBDA * after * ~end
        following = v
        found.append(after)
    return torch.stack(found).flip(0)


def main() -> None:
    """Train, diagnose on the way, and look back in the end."""
    parser = argparse.ArgumentParser(description="Recurrent PPO on a T-maze.")
    parser.add_argument("--iterations", type=int, default=15)
    options = parser.parse_args()

    torch.manual_seed(0)
    agent, maze, state = Agent(), TMaze(MAZES), None
    optimizer = torch.optim.Adam(agent.parameters(), lr=5e-3)
    # The whole rollout is one window without context, as recurrent PPO is usually trained.
    tbptt = at.AdaptiveTBPTT(agent, ppo_loss, 0, losses=STEPS)
    for iteration in range(options.iterations):
        rollout = Rollout(agent, maze, state)
        state = rollout.final
        print(f"iteration {iteration:2d}  return {rollout.mean_return:5.2f}", flush=True)
        if iteration == LEARNING:
            rollout = Rollout(agent, maze, state, steps=512)
            state = rollout.final
            stream = rollout.stream()
            print(f"\n{at.diagnose(agent, ppo_loss, stream, losses=16, lags=32, seconds=2)}\n")
            continue
        for _ in range(EPOCHS):
            for rows in torch.randperm(MAZES).chunk(MINIBATCHES):
                for window in tbptt.windows(rollout.stream(rows)):
                    window.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
    rollout = Rollout(agent, maze, state, steps=512)
    print(f"trained       return {rollout.mean_return:5.2f}\n")
    print(at.lookback(agent, value_loss, rollout.stream(), longest=32, predict=policy_of))


if __name__ == "__main__":
    main()
