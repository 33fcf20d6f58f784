"""GRU4Rec on visits of a shop: the next item against negatives of each visit's own."""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class VisitEncoder(nn.Module):
    def __init__(self, items, dim):
        super().__init__()
        self.items = nn.Embedding(items, dim, padding_idx=0)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.project = nn.Linear(dim, dim)

    def encode(self, visits, lengths):
        hidden, _ = self.gru(self.items(visits))
        last = hidden[torch.arange(len(lengths)), lengths - 1]
        return self.project(last)

    def forward(self, visits, lengths, targets, negatives):
        visitor = self.encode(visits, lengths)
        candidates = torch.cat([targets[:, None], negatives], dim=1)
        scores = torch.bmm(self.items(candidates), visitor[:, :, None]).squeeze(2)
        hit = negatives == targets[:, None]
        scores[:, 1:].masked_fill_(hit, -1e4)
        return scores


class VisitData:
    def __init__(self, count, items, longest, seed):
        rng = np.random.default_rng(seed)
        self.rng, self.num_items = rng, items
        self.visits = rng.integers(1, items, (count, longest))
        self.lengths = rng.integers(longest - 2, longest + 1, count)
        self.visits[np.arange(longest) >= self.lengths[:, None]] = 0
        self.targets = (self.visits[:, 0] * 7 + self.visits[:, 1]) % (items - 1) + 1

    def draw_negatives(self, visits, targets, count):
        return self.rng.integers(1, self.num_items, (len(targets), count))

    def draw(self, size, negatives):
        rows = self.rng.integers(0, len(self.targets), size)
        visits, targets = self.visits[rows], self.targets[rows]
        drawn = self.draw_negatives(visits, targets, negatives)
        arrays = visits, self.lengths[rows], targets, drawn
        return tuple(torch.from_numpy(array) for array in arrays)


class Average:
    def __init__(self):
        self.total, self.count = torch.zeros(()), 0

    def add(self, value):
        self.total += value
        self.count += 1

    def take(self):
        mean = self.total.item() / max(self.count, 1)
        self.total.zero_()
        self.count = 0
        return mean


def train(args):
    torch.manual_seed(17)
    data = VisitData(30_000, args.items, args.longest, seed=17)
    model = VisitEncoder(args.items, args.dim)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    answer = torch.zeros(args.batch, dtype=torch.long)
    average = Average()
    for step in range(1, args.steps + 1):
        batch = data.draw(args.batch, args.negatives)
        loss = F.cross_entropy(model(*batch), answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.add(loss.detach())
        if step % args.report == 0:
            print(f"{Path(__file__).stem} step {step} loss {average.take():.4f}")


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--steps", type=int, default=100_000)
    cli.add_argument("--items", type=int, default=5000)
    cli.add_argument("--dim", type=int, default=96)
    cli.add_argument("--longest", type=int, default=20)
    cli.add_argument("--batch", type=int, default=256)
    cli.add_argument("--negatives", type=int, default=64)
    cli.add_argument("--report", type=int, default=50)
    train(cli.parse_args())
