"""Two towers for retrieval, trained with the other items of the batch as negatives."""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Tower(nn.Module):
    def __init__(self, rows, dim, num_features):
        super().__init__()
        self.ids = nn.Embedding(rows, dim, sparse=True)
        self.layers = nn.Sequential(
            nn.Linear(dim + num_features, 512),
            nn.GELU(),
            nn.Linear(512, 256),
            nn.GELU(),
            nn.Linear(256, 64),
        )

    def forward(self, ids, features):
        return F.normalize(self.layers(torch.cat([self.ids(ids), features], dim=1)), dim=1)


class Interactions:
    def __init__(self, users, items, count, seed):
        rng = np.random.default_rng(seed)
        self.users = torch.from_numpy(rng.integers(0, users, count))
        popularity = rng.zipf(1.3, count) % items
        self.items = torch.from_numpy(popularity)
        self.user_features = torch.from_numpy(rng.standard_normal((count, 32), dtype=np.float32))
        self.item_features = torch.from_numpy(rng.standard_normal((count, 48), dtype=np.float32))
        counts = np.bincount(popularity, minlength=items) + 1
        self.log_popularity = np.log(counts / counts.sum()).astype(np.float32)

    def sample(self, size, generator):
        rows = torch.randint(0, len(self.users), (size,), generator=generator)
        return (
            self.users[rows],
            self.user_features[rows],
            self.items[rows],
            self.item_features[rows],
        )


def in_batch_softmax(user_vectors, item_vectors, correction, temperature=0.05):
    scores = user_vectors @ item_vectors.T / temperature - correction
    return F.cross_entropy(scores, torch.arange(len(scores)))


def build_optimizers(user_tower, item_tower):
    tables = [user_tower.ids.weight, item_tower.ids.weight]
    dense = [*user_tower.layers.parameters(), *item_tower.layers.parameters()]
    return torch.optim.Adam(dense, lr=1e-3), torch.optim.SparseAdam(tables, lr=1e-3)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=1280)
    parser.add_argument("--users", type=int, default=120_000)
    parser.add_argument("--items", type=int, default=40_000)
    args = parser.parse_args()

    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(3)
    data = Interactions(args.users, args.items, 100_000, seed=3)
    user_tower, item_tower = Tower(args.users, 48, 32), Tower(args.items, 48, 48)
    optimizers = build_optimizers(user_tower, item_tower)
    for step in range(args.steps):
        users, user_features, items, item_features = data.sample(args.batch_size, generator)
        user_vectors = user_tower(users, user_features)
        item_vectors = item_tower(items, item_features)
        correction = torch.from_numpy(data.log_popularity[items.numpy()])
        loss = in_batch_softmax(user_vectors, item_vectors, correction)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if step % 25 == 0:
            print("step", step, "loss", round(loss.item(), 4), flush=True)


if __name__ == "__main__":
    main()
