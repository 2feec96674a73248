"""The recurrent PPO of the example has the gradient of the plain loop that people write for it."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch.distributions import Categorical

import adaptive_tbptt as at

PATH = Path(__file__).parents[2] / "examples" / "recurrent_ppo.py"
CLIP, VALUE, ENTROPY = 0.2, 0.5, 0.01


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("recurrent_ppo", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def collected(example):
    """A second rollout, so that it begins in the middle of episodes; then weights that differ."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        agent, maze = example.Agent(hidden=6), example.TMaze(8)
        first = example.Rollout(agent, maze, None, steps=21)
        rollout = example.Rollout(agent, maze, first.final, steps=21)
        with torch.no_grad():  # as in a later epoch: some ratios are clipped
            for p in agent.parameters():
                p.add_(0.3 * torch.randn_like(p))
        yield agent, rollout
    finally:
        torch.set_default_dtype(torch.float32)


def plain_loss(agent, rollout, envs):
    """Python over the steps, states times (1 - done), then everything flattened."""
    done = rollout.resets[:, envs].double()
    state = [leaf[:, envs] for leaf in rollout.state]
    hidden = []
    for x, d in zip(rollout.inputs[:, envs], done, strict=True):
        kept = tuple((1.0 - d).view(1, -1, 1) * leaf for leaf in state)
        h, state = agent.lstm(x.unsqueeze(0), kept)
        hidden.append(h)
    hidden = torch.cat(hidden).flatten(0, 1)
    batch = {name: part[:, envs].reshape(-1) for name, part in rollout.targets.items()}
    policy = Categorical(logits=agent.actor(hidden))
    ratio = (policy.log_prob(batch["action"]) - batch["log_prob"]).exp()
    assert ((ratio - 1).abs() > CLIP).any()
    advantage = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
    policy_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
    value_loss = 0.5 * ((agent.critic(hidden).view(-1) - batch["return"]) ** 2).mean()
    return policy_loss - ENTROPY * policy.entropy().mean() + VALUE * value_loss


def gradients(agent):
    return [p.grad.clone() for p in agent.parameters()]


def test_a_window_has_the_gradient_of_the_plain_loop(example, collected):
    agent, rollout = collected
    assert rollout.resets[1:].any()
    assert not rollout.resets[0].all()
    assert all(leaf.any() for leaf in rollout.state)
    tbptt = at.AdaptiveTBPTT(agent, example.ppo_loss, 0, losses=21)
    for envs in torch.randperm(8).chunk(2):
        agent.zero_grad()
        (loss,) = [window.backward() for window in tbptt.windows(rollout.stream(envs))]
        found = gradients(agent)
        agent.zero_grad()
        expected = plain_loss(agent, rollout, envs)
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
        for a, b in zip(found, gradients(agent), strict=True):
            assert b.any()
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-15)


def test_advantages_are_those_of_episodes_by_hand(example):
    """Lambda = 1: the discounted return less the value, bootstrapped where the rollout ends."""
    torch.manual_seed(0)
    reward, value = torch.randn(6, 2), torch.randn(6, 2)
    ends = torch.zeros(6, 2, dtype=torch.bool)
    ends[2, 0] = ends[5, 0] = True
    last = torch.randn(2)
    kept, example.LAMBDA = example.LAMBDA, 1.0
    try:
        found = example.advantages(reward, value, last, ends)
    finally:
        example.LAMBDA = kept
    for row in range(2):
        for t in range(6):
            total, factor = 0.0, 1.0
            for s in range(t, 6):
                total, factor = total + factor * float(reward[s, row]), factor * example.GAMMA
                if ends[s, row]:
                    break
            else:
                total += factor * float(last[row])
            assert float(found[t, row]) == pytest.approx(total - float(value[t, row]), abs=1e-5)
