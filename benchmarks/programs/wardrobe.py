"""What a customer buys next in a clothing shop: sampled softmax over a large catalogue."""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

GARMENTS = 300_000
BRANDS = 3_000


class Purchases(Dataset):
    """Customers' past garments (ragged, 0 is no garment) and the one bought next."""

    def __init__(self, customers, seed):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(4, 25, customers)
        self.ends = np.cumsum(lengths)
        self.begins = self.ends - lengths
        self.past = self.skewed(rng, self.ends[-1])
        self.bought = self.skewed(rng, customers)

    @staticmethod
    def skewed(rng, count):
        return 1 + (rng.random(count) ** 2.5 * (GARMENTS - 1)).astype(np.int64)

    def __len__(self):
        return len(self.bought)

    def __getitem__(self, rows):
        begins, ends = self.begins[rows], self.ends[rows]
        at = begins[:, None] + np.arange((ends - begins).max())
        past = np.where(at < ends[:, None], self.past[np.minimum(at, len(self.past) - 1)], 0)
        return torch.from_numpy(past), torch.from_numpy(self.bought[rows])


class Chunks(Sampler):
    """Each epoch a new order of the rows, cut into chunks of one batch."""

    def __init__(self, rows, size, limit=None):
        self.rows, self.size = rows, size
        self.count = min(rows // size, limit or rows)

    def __len__(self):
        return self.count

    def __iter__(self):
        order = np.random.permutation(self.rows)
        for number in range(self.count):
            yield order[number * self.size : (number + 1) * self.size]


class Shop(nn.Module):
    def __init__(self, dim=48, hidden=512, out=64):
        super().__init__()
        self.garment = nn.Embedding(GARMENTS, dim, sparse=True)
        self.brand = nn.Embedding(BRANDS, dim, sparse=True)
        nn.init.normal_(self.garment.weight, std=0.1)
        nn.init.normal_(self.brand.weight, std=0.1)
        self.register_buffer("brand_of", torch.randint(0, BRANDS, (GARMENTS,)))
        self.customer_tower = self.tower(dim, hidden, out)
        self.garment_tower = self.tower(2 * dim, hidden, out)

    @staticmethod
    def tower(inputs, hidden, out):
        return nn.Sequential(
            nn.Linear(inputs, hidden), nn.LeakyReLU(), nn.Linear(hidden, hidden),
            nn.LeakyReLU(), nn.Linear(hidden, out),
        )

    def customers(self, past):
        known = (past > 0).float().unsqueeze(2)
        mean = (self.garment(past) * known).sum(1) / known.sum(1)
        return F.normalize(self.customer_tower(mean), dim=1)

    def garments(self, ids):
        both = torch.cat([self.garment(ids), self.brand(self.brand_of[ids])], dim=1)
        return F.normalize(self.garment_tower(both), dim=1)


class Negatives:
    """Garments drawn by a power of their sales."""

    def __init__(self, dataset, power=0.75):
        sales = np.bincount(dataset.past, minlength=GARMENTS) + 1.0
        sales[0] = 0.0
        self.chance = torch.from_numpy(sales**power)
        self.chance /= self.chance.sum()
        self.cumulative = self.chance.cumsum(0)
        self.log_chance = self.chance.clamp_min(1e-12).log().float()

    def draw(self, count):
        where = torch.rand(count, dtype=torch.float64)
        return torch.searchsorted(self.cumulative, where).clamp_max(GARMENTS - 1)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.dataset = Purchases(150_000, seed=5)
        self.negatives = Negatives(self.dataset)
        self.model = Shop()
        towers = [*self.model.customer_tower.parameters(), *self.model.garment_tower.parameters()]
        tables = [self.model.garment.weight, self.model.brand.weight]
        self.optimizers = [
            torch.optim.AdamW(towers, lr=5e-4),
            torch.optim.SparseAdam(tables, lr=2e-3),
        ]
        self.loader = DataLoader(
            self.dataset,
            sampler=Chunks(len(self.dataset), args.batch_size, args.epoch_batches),
            batch_size=None,
            num_workers=1,
            persistent_workers=True,
        )

    def loss(self, past, bought):
        drawn = self.negatives.draw(self.args.negatives)
        ids = torch.cat([bought, drawn])
        customers, garments = self.model.customers(past), self.model.garments(ids)
        right = (customers * garments[: len(bought)]).sum(1) / 0.07
        right = right - self.negatives.log_chance[bought]
        wrong = customers @ garments[len(bought) :].T / 0.07 - self.negatives.log_chance[drawn]
        wrong = wrong.masked_fill(bought[:, None] == drawn, -1e9)
        return (torch.logsumexp(torch.cat([right[:, None], wrong], dim=1), dim=1) - right).mean()

    def fit(self):
        step = 0
        while step < self.args.steps:
            for past, bought in self.loader:
                loss = self.loss(past, bought)
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
                loss.backward()
                for optimizer in self.optimizers:
                    optimizer.step()
                if step % 50 == 0:
                    print(f"step {step}: loss {loss.item():.3f}", flush=True)
                step += 1
                if step >= self.args.steps:
                    break


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--negatives", type=int, default=1024)
    parser.add_argument("--epoch-batches", type=int, default=None)
    torch.manual_seed(5)
    np.random.seed(5)
    Trainer(parser.parse_args()).fit()
