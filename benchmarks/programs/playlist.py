"""Which song comes next: a causal transformer over playlists with sampled negatives (SASRec)."""

import argparse
import math
import queue
import threading

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

SONGS = 3000
LENGTH = 48
BATCH = 80
DIM = 96
HEADS = 4
SHARED = 64  # negatives of a batch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=50_000)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--report", type=int, default=100)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.ReLU(), nn.Linear(4 * DIM, DIM))

    def attend(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x.transpose(1, 2).reshape(b, t, DIM))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def waves(length, dim):
    position = torch.arange(length)[:, None]
    rate = torch.exp(torch.arange(0, dim, 2) * (-math.log(10_000.0) / dim))
    table = torch.zeros(length, dim)
    table[:, 0::2] = torch.sin(position * rate)
    table[:, 1::2] = torch.cos(position * rate)
    return table


class NextSong(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.songs = nn.Embedding(SONGS + 1, DIM, padding_idx=0)
        self.register_buffer("positions", waves(LENGTH, DIM))
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.norm = nn.LayerNorm(DIM)

    def forward(self, played):
        x = self.songs(played) * DIM**0.5 + self.positions
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def score(self, hidden, following, negatives):
        positive = (hidden * self.songs(following)).sum(-1)
        negative = hidden @ self.songs(negatives).T
        return positive, negative


def make_playlists(count=20_000):
    rng = np.random.default_rng(3)
    start = rng.integers(1, SONGS + 1, (count, 1))
    moves = rng.integers(-12, 14, (count, LENGTH)).cumsum(axis=1)
    return np.concatenate([start, 1 + (start - 1 + moves) % SONGS], axis=1)


def make_batch(playlists, rng):
    rows = torch.from_numpy(playlists[rng.integers(0, len(playlists), BATCH)])
    negatives = torch.from_numpy(rng.integers(1, SONGS + 1, SHARED))
    return rows[:, :-1], rows[:, 1:], negatives


class Background(threading.Thread):
    """Makes batches ahead of the training loop."""

    def __init__(self, playlists, ahead=4):
        super().__init__(daemon=True)
        self.playlists = playlists
        self.rng = np.random.default_rng(4)
        self.ready = queue.Queue(maxsize=ahead)

    def run(self):
        while True:
            self.ready.put(make_batch(self.playlists, self.rng))

    def next(self):
        return self.ready.get()


def train(args):
    torch.manual_seed(3)
    model = NextSong()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    background = Background(make_playlists())
    background.start()
    total = 0.0
    for step in range(args.steps):
        played, following, negatives = background.next()
        hidden = model(played)
        positive, negative = model.score(hidden, following, negatives)
        loss = F.softplus(-positive).mean() + F.softplus(negative).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if (step + 1) % args.report == 0:
            print("step", step + 1, "loss", round(float(total) / args.report, 4))
            total = 0.0


if __name__ == "__main__":
    train(parser.parse_args())
