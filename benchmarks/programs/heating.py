"""Soft actor-critic that learns to heat the rooms of simulated houses."""

import argparse
import itertools

import numpy as np
import torch
from torch import nn
from torch.distributions import Independent, Normal

N_ROOMS = 16
OBS = 3 * N_ROOMS
GAMMA, TAU, ALPHA = 0.98, 0.005, 0.1


class Houses:
    """A few houses at once: warmth of rooms, of their walls, and the wish of who lives there."""

    def __init__(self, count, seed):
        self.rng = np.random.default_rng(seed)
        self.count = count
        self.leak = self.rng.uniform(0.02, 0.1, (count, N_ROOMS))
        self.room = self.rng.normal(0, 1, (count, N_ROOMS))
        self.wall = self.rng.normal(0, 1, (count, N_ROOMS))
        self.wish = self.rng.normal(0, 1, (count, N_ROOMS))

    def observe(self):
        return np.concatenate([self.room, self.wall, self.wish], axis=1).astype(np.float32)

    def step(self, action):
        flow = self.leak * (self.wall - self.room)
        self.room = self.room + flow + 0.1 * action
        self.wall = self.wall - 0.5 * flow + self.rng.normal(0, 0.02, self.wall.shape)
        changed = self.rng.random(self.wish.shape) < 0.01
        self.wish = np.where(changed, self.rng.normal(0, 1, self.wish.shape), self.wish)
        cost = np.abs(self.room - self.wish).mean(1) + 0.05 * np.abs(action).mean(1)
        return self.observe(), -cost.astype(np.float32)


class Memory:
    """The last transitions, in arrays that are written round and round."""

    def __init__(self, capacity, seed):
        self.rng = np.random.default_rng(seed)
        self.capacity, self.size, self.head = capacity, 0, 0
        shapes = {"obs": (OBS,), "act": (N_ROOMS,), "rew": (), "nxt": (OBS,)}
        self.data = {k: np.zeros((capacity, *s), np.float32) for k, s in shapes.items()}

    def add(self, **transition):
        count = len(transition["rew"])
        at = (self.head + np.arange(count)) % self.capacity
        for k, v in transition.items():
            self.data[k][at] = v
        self.head = (self.head + count) % self.capacity
        self.size = min(self.size + count, self.capacity)

    def sample(self, n):
        at = self.rng.integers(0, self.size, n)
        return [torch.from_numpy(v[at]) for v in self.data.values()]


def mlp(*sizes):
    pairs = list(itertools.pairwise(sizes))
    layers = [layer for a, b in pairs for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Actor(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.net = mlp(OBS, hidden, hidden, 2 * N_ROOMS)

    def policy(self, obs):
        mean, log_std = self.net(obs).chunk(2, dim=-1)
        std = log_std.clamp(-5, 1).exp()
        return Independent(Normal(mean, std), 1)

    def forward(self, obs):
        policy = self.policy(obs)
        raw = policy.rsample()
        act = raw.tanh()
        squash = torch.log(1 - act.square() + 1e-6).sum(-1)
        return act, policy.log_prob(raw) - squash


class Agent:
    def __init__(self, hidden, lr):
        self.actor = Actor(hidden)
        self.critics = nn.ModuleList(mlp(OBS + N_ROOMS, hidden, hidden, 1) for _ in range(2))
        self.targets = nn.ModuleList(mlp(OBS + N_ROOMS, hidden, hidden, 1) for _ in range(2))
        self.targets.load_state_dict(self.critics.state_dict())
        self.critic_opt = torch.optim.Adam(self.critics.parameters(), lr=lr)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=lr)

    @torch.no_grad()
    def act(self, obs):
        return self.actor(torch.from_numpy(obs))[0].numpy()

    @staticmethod
    def q(nets, obs, act):
        both = torch.cat([obs, act], dim=-1)
        return torch.stack([net(both).squeeze(-1) for net in nets])

    def update_critics(self, obs, act, rew, nxt):
        with torch.no_grad():
            nxt_act, logp = self.actor(nxt)
            goal = rew + GAMMA * (self.q(self.targets, nxt, nxt_act).amin(0) - ALPHA * logp)
        loss = (self.q(self.critics, obs, act) - goal).square().mean()
        self.critic_opt.zero_grad()
        loss.backward()
        self.critic_opt.step()
        return loss.detach()

    def update_actor(self, obs):
        self.critics.requires_grad_(False)
        act, logp = self.actor(obs)
        loss = (ALPHA * logp - self.q(self.critics, obs, act).amin(0)).mean()
        self.actor_opt.zero_grad()
        loss.backward()
        self.actor_opt.step()
        self.critics.requires_grad_(True)

    @torch.no_grad()
    def follow(self):
        torch._foreach_lerp_([*self.targets.parameters()], [*self.critics.parameters()], TAU)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=896)
    parser.add_argument("--hidden", type=int, default=384)
    args = parser.parse_args()

    torch.manual_seed(23)
    houses, memory = Houses(64, seed=23), Memory(200_000, seed=24)
    agent = Agent(args.hidden, lr=3e-4)
    obs = houses.observe()
    for _ in range(2500):
        act = houses.rng.uniform(-1, 1, (houses.count, N_ROOMS)).astype(np.float32)
        nxt, rew = houses.step(act)
        memory.add(obs=obs, act=act, rew=rew, nxt=nxt)
        obs = nxt

    for step in range(args.steps):
        act = agent.act(obs)
        nxt, rew = houses.step(act)
        memory.add(obs=obs, act=act, rew=rew, nxt=nxt)
        obs = nxt
        batch = memory.sample(args.batch)
        loss = agent.update_critics(*batch)
        agent.update_actor(batch[0])
        agent.follow()
        if step % 40 == 0:
            print(f"step {step}: reward {rew.mean():.3f}, critics {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
