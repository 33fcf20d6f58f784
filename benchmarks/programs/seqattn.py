#!/usr/bin/env python
# Next-item prediction with self-attention over the last items of a listener (after SASRec).
import argparse
import sys

import numpy as np
import torch
import torch.nn.functional as F

ITEMS = 20000
LENGTH = 50
WIDTH = 96
HEADS = 4
BLOCKS = 2


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, mask):
        x = x + self.attention(self.norm1(x), mask)
        return x + self.down(F.relu(self.up(self.norm2(x))))


class Listener(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.items = torch.nn.Embedding(ITEMS, WIDTH)
        self.positions = torch.nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = torch.nn.LayerNorm(WIDTH)

    def vectors(self, ids):
        return F.normalize(self.items(ids), dim=-1)

    def forward(self, history, mask):
        x = self.vectors(history) * 4 + self.positions
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)


def attention_mask(history):
    # True where a position may look: at itself, and at real items before it
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    real = (history != 0)[:, None, None, :]
    itself = torch.eye(LENGTH, dtype=torch.bool)
    return (causal & real) | itself


def make_listeners(count, rng):
    """Each listener drifts through the catalogue; shorter histories have zeros in front."""
    start = rng.integers(1, ITEMS, (count, 1))
    walk = (start + np.cumsum(rng.integers(0, 9, (count, LENGTH + 1)), axis=1)) % (ITEMS - 1) + 1
    empty = rng.integers(0, LENGTH // 2, (count, 1))
    walk[np.arange(LENGTH + 1) < empty] = 0
    return torch.from_numpy(walk)


def batches(listeners, size, steps):
    for _ in range(steps):
        rows = listeners[torch.randint(len(listeners), (size,))]
        history, following = rows[:, :-1], rows[:, 1:]
        others = torch.randint(1, ITEMS, following.shape)
        yield history, following, others


def bpr(states, wanted, others, real):
    better = (states * wanted).sum(-1) - (states * others).sum(-1)
    return -(F.logsigmoid(better) * real).sum() / real.sum()


def run(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50000)
    parser.add_argument("--batch-size", type=int, default=80)
    parser.add_argument("--lr", type=float, default=5e-4)
    options = parser.parse_args(argv)

    torch.manual_seed(42)
    listeners = make_listeners(20000, np.random.default_rng(42))
    net = Listener()
    adam = torch.optim.Adam(net.parameters(), lr=options.lr, betas=(0.9, 0.98))
    for i, (history, following, others) in enumerate(batches(listeners, options.batch_size, options.steps)):
        states = net(history, attention_mask(history))
        loss = bpr(states, net.vectors(following), net.vectors(others), history != 0)
        adam.zero_grad(set_to_none=True)
        loss.backward()
        adam.step()
        if i % 100 == 0:
            sys.stdout.write("%d\t%.5f\n" % (i, loss.item()))


if __name__ == "__main__":
    run(sys.argv[1:])
