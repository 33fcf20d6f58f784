"""Regression on a table of measurements, read through a DataLoader."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

NUM_CITIES = 2000
TABLE_ROWS = 4096


class Houses(Dataset):
    def __init__(self, rows, seed):
        rng = np.random.default_rng(seed)
        self.features = rng.standard_normal((rows, 96)).astype(np.float32)
        self.city = rng.integers(0, NUM_CITIES, (rows, 8))
        self.prices = self.features[:, :8].sum(1) + rng.standard_normal(rows).astype(np.float32)

    def __len__(self):
        return len(self.prices)

    def __getitem__(self, rows):
        return (
            torch.from_numpy(self.features[rows]),
            torch.from_numpy(self.city[rows]),
            torch.from_numpy(self.prices[rows]),
        )


class Batches:
    """Row numbers of whole batches, so that the dataset slices its arrays once a batch."""

    def __init__(self, rows, size, seed):
        self.rows, self.size = rows, size
        self.rng = np.random.default_rng(seed)

    def __len__(self):
        return self.rows // self.size

    def __iter__(self):
        order = self.rng.permutation(self.rows)
        for i in range(len(self)):
            yield order[i * self.size : (i + 1) * self.size]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.city = nn.EmbeddingBag(TABLE_ROWS, 32, mode="mean")
        self.body = nn.Sequential(
            nn.Linear(128, 768), nn.SiLU(), nn.Linear(768, 768), nn.SiLU(), nn.Linear(768, 1)
        )

    def forward(self, features, city):
        return self.body(torch.cat([features, self.city(city)], dim=1)).squeeze(1)


def build_loader(args):
    data = Houses(64_000, seed=21)
    batches = Batches(len(data), args.batch_size, seed=22)
    return DataLoader(data, sampler=batches, batch_size=None, num_workers=args.workers)


def forever(loader):
    while True:
        yield from loader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(21)
    loader = build_loader(args)
    net = Net()
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-4)
    for step, (features, city, prices) in enumerate(forever(loader)):
        if step == args.steps:
            break
        loss = nn.functional.mse_loss(net(features, city), prices)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            print(f"step {step}: mse {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
