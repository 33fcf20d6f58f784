# SimCLR on windows of a wrist sensor (6 channels, 128 samples): two views of a window should agree.
import argparse
import math
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100_000)
parser.add_argument("--batch", type=int, default=96)
parser.add_argument("--tau", type=float, default=0.2)
parser.add_argument("--width", type=int, default=40)
args = parser.parse_args()

CHANNELS, SAMPLES, MOVES = 6, 128, 12
torch.manual_seed(21)


def record(count):
    """Oscillations with a frequency and a phase per channel, which the movement decides."""
    move = torch.randint(MOVES, (count,))
    tones = torch.rand(MOVES, CHANNELS, 1) * 6 + 1
    phases = torch.rand(MOVES, CHANNELS, 1) * 2 * math.pi
    t = torch.linspace(0, 2 * math.pi, SAMPLES)
    clean = torch.sin(tones[move] * t + phases[move] + torch.rand(count, 1, 1))
    return clean + 0.3 * torch.randn(count, CHANNELS, SAMPLES), move


def augment(x):
    """A random scale, a random shift in time, noise."""
    scale = 1 + 0.2 * torch.randn(len(x), x.shape[1], 1)
    shift = torch.randint(-16, 17, (len(x), 1, 1))
    where = (torch.arange(SAMPLES) + shift) % SAMPLES
    moved = x.gather(2, where.expand(-1, x.shape[1], -1))
    return moved * scale + 0.05 * torch.randn_like(x)


def block(n_in, n_out, stride):
    conv = nn.Conv1d(n_in, n_out, 7, stride, padding=3, bias=False)
    return nn.Sequential(conv, nn.BatchNorm1d(n_out), nn.ReLU(inplace=True))


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            block(CHANNELS, width, 1),
            block(width, 2 * width, 2),
            block(2 * width, 2 * width, 1),
            block(2 * width, 4 * width, 2),
        )
        self.head = nn.Sequential(
            nn.Linear(4 * width, 128), nn.ReLU(inplace=True), nn.Linear(128, 64)
        )

    def forward(self, x):
        features = self.body(x).mean(2)
        return features, F.normalize(self.head(features), dim=1)


def nt_xent(z, tau):
    """z holds the first views of all windows, then the second ones."""
    similar = z @ z.T / tau
    same = torch.eye(len(z), dtype=torch.bool)
    similar = similar.masked_fill(same, float("-inf"))
    partner = torch.arange(len(z)).roll(len(z) // 2)
    return F.cross_entropy(similar, partner)


class Bank:
    """The newest features and their movements, for a nearest-neighbour check now and then."""

    def __init__(self, room, dim):
        self.features, self.moves = torch.zeros(room, dim), torch.zeros(room, dtype=torch.long)
        self.next = self.filled = 0

    def add(self, features, moves):
        where = (torch.arange(len(features)) + self.next) % len(self.features)
        self.features[where] = features
        self.moves[where] = moves
        self.next = (self.next + len(features)) % len(self.features)
        self.filled = min(self.filled + len(features), len(self.features))

    def agreement(self, features, moves):
        distance = torch.cdist(features, self.features[: self.filled])
        return (self.moves[distance.argmin(1)] == moves).float().mean().item()


windows, moves = record(6000)
encoder = Encoder(args.width)
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
bank = Bank(2048, 4 * args.width)
rng = np.random.default_rng(22)
tic = time.time()

for step in range(args.steps):
    rows = torch.from_numpy(rng.choice(len(windows), args.batch, replace=False))
    x = windows[rows]
    views = torch.cat([augment(x), augment(x)])
    features, z = encoder(views)
    loss = nt_xent(z, args.tau)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    schedule.step()
    seen = features[: len(x)].detach()
    if step % 100 == 99:
        knn = bank.agreement(seen, moves[rows])
        print(f"[{step + 1}] loss {loss.item():.3f} knn {knn:.2f} ({time.time() - tic:.0f} s)")
    bank.add(seen, moves[rows])
