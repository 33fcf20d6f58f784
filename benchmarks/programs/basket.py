"""Next purchase from the items bought before: bags of items, a wide MLP, sampled classes."""

import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

NUM_ITEMS = 50_000
NUM_CLASSES = 400


class Basket(nn.Module):
    def __init__(self, num_items, dim, num_classes):
        super().__init__()
        self.history = nn.EmbeddingBag(num_items, dim, mode="sum", sparse=True)
        self.context = nn.Linear(24, dim)
        self.head = nn.Sequential(
            nn.Linear(2 * dim, 640), nn.ReLU(), nn.Linear(640, 640), nn.ReLU()
        )
        self.classes = nn.Linear(640, num_classes)

    def forward(self, context, items, offsets):
        bags = self.history(items, offsets)
        hidden = torch.cat([bags, self.context(context)], dim=1)
        return self.classes(self.head(hidden))


class Purchases:
    """Purchases of a shop, kept as one flat array of items and the length of each basket."""

    def __init__(self, num_baskets, seed):
        rng = np.random.default_rng(seed)
        self.lengths = rng.integers(3, 8, num_baskets)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self.items = rng.integers(1, NUM_ITEMS, self.starts[-1])
        self.context = rng.standard_normal((num_baskets, 24)).astype(np.float32)
        self.labels = rng.integers(0, NUM_CLASSES, num_baskets)

    def batch(self, step, size):
        first = (step * size) % (len(self.lengths) - size)
        starts = self.starts[first : first + size + 1]
        items = self.items[starts[0] : starts[-1]]
        offsets = starts[:-1] - starts[0]
        return (
            torch.from_numpy(self.context[first : first + size]),
            torch.from_numpy(items),
            torch.from_numpy(offsets),
            torch.from_numpy(self.labels[first : first + size]),
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=1024)
    args = parser.parse_args()

    torch.manual_seed(0)
    purchases = Purchases(40_000, seed=2)
    model = Basket(NUM_ITEMS, 64, NUM_CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    began = time.time()
    for step in range(args.steps):
        context, items, offsets, labels = purchases.batch(step, args.batch_size)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(context, items, offsets), labels)
        loss.backward()
        optimizer.step()
        if step % 40 == 39:
            rate = (step + 1) * args.batch_size / (time.time() - began)
            print(f"{step + 1:6d} {loss.item():.4f} {rate:.0f} samples/s")


if __name__ == "__main__":
    main()
