"""A small DLRM: bottom MLP, bags of categorical features, pairwise dot products, top MLP."""

import argparse
import itertools
import time

import numpy as np
import torch
from torch import nn

NUM_DENSE, DIM = 64, 32
ROWS = [100_000, 60_000, 40_000, 10_000, 5_000, 1_000]


def mlp(sizes, last):
    layers = []
    for i, (n_in, n_out) in enumerate(itertools.pairwise(sizes)):
        layers.append(nn.Linear(n_in, n_out))
        layers.append(last if i == len(sizes) - 2 else nn.ReLU())
    return nn.Sequential(*layers)


class DotNet(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.bottom = mlp([NUM_DENSE, 512, 256, DIM], nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, DIM, mode="sum", sparse=True) for n in rows)
        vectors = len(rows) + 1
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1))
        self.top = mlp([DIM + vectors * (vectors - 1) // 2, 768, 512, 1], nn.Identity())

    def interact(self, x, bags):
        vectors = torch.stack([x, *bags], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.cat([x, products[:, self.pairs[0], self.pairs[1]]], dim=1)

    def forward(self, dense, indices, offsets):
        x = self.bottom(dense)
        bags = [table(indices[i], offsets) for i, table in enumerate(self.tables)]
        return self.top(self.interact(x, bags)).squeeze(1)


def make_batches(count, size, lookups, seed):
    rng = np.random.default_rng(seed)
    offsets = torch.arange(0, size * lookups, lookups)
    batches = []
    for _ in range(count):
        dense = torch.from_numpy(rng.standard_normal((size, NUM_DENSE), dtype=np.float32))
        indices = [torch.from_numpy(rng.integers(0, n, size * lookups)) for n in ROWS]
        labels = torch.from_numpy(rng.integers(0, 2, size).astype(np.float32))
        batches.append((dense, indices, offsets, labels))
    return batches


@torch.no_grad()
def evaluate(model, batches):
    model.eval()
    correct = sum(
        ((model(*inputs) > 0) == labels.bool()).float().mean().item() for *inputs, labels in batches
    )
    model.train()
    return correct / len(batches)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=1536)
    parser.add_argument("--lookups", type=int, default=4)
    parser.add_argument("--test-every", type=int, default=2000)
    args = parser.parse_args()

    torch.manual_seed(7)
    train = make_batches(24, args.batch_size, args.lookups, seed=7)
    test = make_batches(4, args.batch_size, args.lookups, seed=8)
    model = DotNet(ROWS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.BCEWithLogitsLoss()
    start = time.time()
    for step in range(1, args.steps + 1):
        *inputs, labels = train[step % len(train)]
        loss = criterion(model(*inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.test_every == 0:
            print(f"accuracy {evaluate(model, test):.4f}")
        if step % 50 == 0:
            print(f"{step} {loss.item():.4f} {(time.time() - start) / step * 1000:.1f} ms/it")


if __name__ == "__main__":
    main()
