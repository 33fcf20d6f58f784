"""Advantage actor-critic on many small mazes at once, everything in this process."""

import argparse
from collections import deque

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]])


class Mazes:
    """Square rooms with random walls; the agent walks to the goal, -0.01 a move, 1 at the goal."""

    def __init__(self, count, side, limit, seed):
        self.rng = np.random.default_rng(seed)
        self.count, self.side, self.limit = count, side, limit
        self.rows = np.arange(count)
        self.walls = self.rng.random((count, side, side)) < 0.2
        self.goal = self.rng.integers(0, side, (count, 2))
        self.agent = self.rng.integers(0, side, (count, 2))
        self.age = np.zeros(count, dtype=np.int64)
        self.walls[self.rows, self.goal[:, 0], self.goal[:, 1]] = False

    def observe(self):
        planes = np.zeros((self.count, 3, self.side, self.side), dtype=np.float32)
        planes[:, 0] = self.walls
        planes[self.rows, 1, self.goal[:, 0], self.goal[:, 1]] = 1
        planes[self.rows, 2, self.agent[:, 0], self.agent[:, 1]] = 1
        return planes.reshape(self.count, -1)

    def step(self, actions):
        there = (self.agent + MOVES[actions]).clip(0, self.side - 1)
        free = ~self.walls[self.rows, there[:, 0], there[:, 1]]
        self.agent = np.where(free[:, None], there, self.agent)
        self.age += 1
        found = (self.agent == self.goal).all(1)
        done = found | (self.age >= self.limit)
        self.agent[done] = self.rng.integers(0, self.side, (done.sum(), 2))
        self.age[done] = 0
        return self.observe(), np.where(found, 1.0, -0.01).astype(np.float32), done


class ActorCritic(nn.Module):
    def __init__(self, inputs, hidden=512):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        )
        self.policy = nn.Linear(hidden, len(MOVES))
        self.value = nn.Linear(hidden, 1)

    def forward(self, obs):
        hidden = self.trunk(obs)
        return self.policy(hidden), self.value(hidden).squeeze(-1)


class Agent:
    def __init__(self, cfg):
        self.cfg = cfg
        self.mazes = Mazes(cfg.envs, cfg.side, cfg.limit, seed=cfg.seed)
        self.obs = torch.from_numpy(self.mazes.observe())
        self.net = ActorCritic(3 * cfg.side**2)
        self.optimizer = torch.optim.RMSprop(self.net.parameters(), lr=cfg.lr, eps=1e-5)
        self.recent = deque(maxlen=100)

    @torch.no_grad()
    def rollout(self):
        """A few moves in each maze with the present policy."""
        seen, acts, rewards, ends = [], [], [], []
        for _ in range(self.cfg.horizon):
            logits, _ = self.net(self.obs)
            action = Categorical(logits=logits, validate_args=False).sample()
            obs, reward, done = self.mazes.step(action.numpy())
            seen.append(self.obs)
            acts.append(action)
            rewards.append(torch.from_numpy(reward))
            ends.append(torch.from_numpy(done))
            self.obs = torch.from_numpy(obs)
        return torch.stack(seen), torch.stack(acts), torch.stack(rewards), torch.stack(ends)

    @torch.no_grad()
    def returns(self, rewards, ends):
        """Discounted rewards, from the value of the last observation backwards."""
        future = self.net(self.obs)[1]
        result = torch.empty_like(rewards)
        for t in reversed(range(len(rewards))):
            future = rewards[t] + self.cfg.gamma * future * ~ends[t]
            result[t] = future
        return result

    def update(self):
        seen, acts, rewards, ends = self.rollout()
        targets = self.returns(rewards, ends).flatten()
        logits, values = self.net(seen.flatten(0, 1))
        policy = Categorical(logits=logits, validate_args=False)
        advantage = targets - values.detach()
        actor = -(policy.log_prob(acts.flatten()) * advantage).mean()
        critic = (targets - values).square().mean()
        loss = actor + 0.5 * critic - self.cfg.entropy * policy.entropy().mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        self.optimizer.step()
        self.recent.append(rewards.mean())


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--envs", type=int, default=256)
    parser.add_argument("--horizon", type=int, default=6)
    parser.add_argument("--side", type=int, default=10)
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--gamma", type=float, default=0.97)
    parser.add_argument("--entropy", type=float, default=0.01)
    parser.add_argument("--lr", type=float, default=7e-4)
    parser.add_argument("--seed", type=int, default=3)
    return parser.parse_args()


def main():
    cfg = parse()
    torch.manual_seed(cfg.seed)
    agent = Agent(cfg)
    for step in range(cfg.steps):
        agent.update()
        if step % 100 == 0:
            print(f"update {step}: reward {torch.stack(tuple(agent.recent)).mean():.4f}")


if __name__ == "__main__":
    main()
