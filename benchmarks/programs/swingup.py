"""TD3 learns to swing up many pendulums at once, from a replay buffer."""

import argparse
import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Pendulums:
    """Two-joint arms with a motor at each joint, stepped together (count, state)."""

    state_size, action_size = 6, 2

    def __init__(self, count, seed):
        self.rng = np.random.default_rng(seed)
        self.angle = self.rng.uniform(-np.pi, np.pi, (count, 2))
        self.speed = np.zeros((count, 2))
        self.age = self.rng.integers(0, 200, count)

    def observe(self):
        parts = [np.cos(self.angle), np.sin(self.angle), self.speed / 8]
        return np.concatenate(parts, axis=1, dtype=np.float32)

    def step(self, action, substeps=4):
        for _ in range(substeps):
            pull = 9.8 * np.sin(self.angle)
            pull[:, 0] += 0.5 * np.sin(self.angle[:, 0] - self.angle[:, 1])
            pull[:, 1] -= 0.5 * np.sin(self.angle[:, 0] - self.angle[:, 1])
            self.speed += 0.0125 * (pull + 4 * action - 0.1 * self.speed)
            np.clip(self.speed, -8, 8, out=self.speed)
            self.angle += 0.0125 * self.speed
        reward = np.cos(self.angle).sum(1) - 0.01 * (self.speed**2).sum(1)
        after = self.observe()
        self.age += 1
        old = self.age >= 200
        self.angle[old] = self.rng.uniform(-np.pi, np.pi, (old.sum(), 2))
        self.speed[old], self.age[old] = 0, 0
        return after, reward.astype(np.float32)


class Replay:
    """A ring of transitions in arrays."""

    def __init__(self, capacity, state_size, action_size, seed):
        self.state = np.zeros((capacity, state_size), np.float32)
        self.after = np.zeros((capacity, state_size), np.float32)
        self.action = np.zeros((capacity, action_size), np.float32)
        self.reward = np.zeros(capacity, np.float32)
        self.capacity, self.size, self.place = capacity, 0, 0
        self.rng = np.random.default_rng(seed)

    def add(self, state, action, reward, after):
        where = (self.place + np.arange(len(state))) % self.capacity
        self.state[where], self.after[where] = state, after
        self.action[where], self.reward[where] = action, reward
        self.place = (self.place + len(state)) % self.capacity
        self.size = min(self.size + len(state), self.capacity)

    def sample(self, count):
        rows = self.rng.integers(0, self.size, count)
        columns = (self.state, self.action, self.reward, self.after)
        return [torch.from_numpy(column[rows]) for column in columns]


def mlp(n_in, n_out, width):
    return nn.Sequential(
        nn.Linear(n_in, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, n_out),
    )


class Critics(nn.Module):
    def __init__(self, n_in, width):
        super().__init__()
        self.one, self.two = mlp(n_in, 1, width), mlp(n_in, 1, width)

    def forward(self, state, action):
        x = torch.cat([state, action], dim=1)
        return self.one(x).squeeze(1), self.two(x).squeeze(1)


class TD3:
    def __init__(self, env, width, gamma=0.98, tau=0.005):
        self.gamma, self.tau = gamma, tau
        self.actor = mlp(env.state_size, env.action_size, width)
        self.critics = Critics(env.state_size + env.action_size, width)
        self.old_actor = copy.deepcopy(self.actor)
        self.old_critics = copy.deepcopy(self.critics)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=3e-4)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-4)
        self.updates = 0

    @torch.no_grad()
    def act(self, state, noise):
        action = torch.tanh(self.actor(torch.from_numpy(state)))
        return (action + noise * torch.randn_like(action)).clamp(-1, 1).numpy()

    @torch.no_grad()
    def target(self, reward, after):
        action = torch.tanh(self.old_actor(after))
        action = (action + (0.2 * torch.randn_like(action)).clamp(-0.5, 0.5)).clamp(-1, 1)
        return reward + self.gamma * torch.minimum(*self.old_critics(after, action))

    def learn(self, state, action, reward, after):
        target = self.target(reward, after)
        first, second = self.critics(state, action)
        critic_loss = F.mse_loss(first, target) + F.mse_loss(second, target)
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()
        self.updates += 1
        if self.updates % 2 == 0:
            self.improve(state)
        return critic_loss.detach()

    def improve(self, state):
        """Move the policy uphill on the first critic, and the slow copies after it."""
        self.critics.requires_grad_(False)
        action = torch.tanh(self.actor(state))
        value = self.critics.one(torch.cat([state, action], dim=1))
        self.actor_optimizer.zero_grad()
        (-value.mean()).backward()
        self.actor_optimizer.step()
        self.critics.requires_grad_(True)
        self.follow(self.old_actor, self.actor)
        self.follow(self.old_critics, self.critics)

    @torch.no_grad()
    def follow(self, slow, fast):
        for old, new in zip(slow.parameters(), fast.parameters()):
            old.lerp_(new, self.tau)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--width", type=int, default=448)
    parser.add_argument("--arms", type=int, default=128)
    parser.add_argument("--warm-up", type=int, default=1_600_000)
    args = parser.parse_args()

    torch.manual_seed(23)
    env = Pendulums(args.arms, seed=23)
    replay = Replay(2_000_000, env.state_size, env.action_size, seed=24)
    rng, state = np.random.default_rng(25), env.observe()
    while replay.size < args.warm_up:
        action = rng.uniform(-1, 1, (args.arms, env.action_size)).astype(np.float32)
        after, reward = env.step(action)
        replay.add(state, action, reward, after)
        state = env.observe()
    agent = TD3(env, args.width)
    for step in range(1, args.steps + 1):
        action = agent.act(state, noise=0.1)
        after, reward = env.step(action)
        replay.add(state, action, reward, after)
        state = env.observe()
        loss = agent.learn(*replay.sample(args.batch_size))
        if step % 60 == 0:
            print(f"{step} critic {loss.item():.4f} reward {reward.mean():.3f}", flush=True)


if __name__ == "__main__":
    main()
