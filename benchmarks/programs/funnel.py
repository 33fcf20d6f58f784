"""ESMM: clicks, and purchases after a click, both learned over all impressions."""

import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

FIELDS = {
    "user": 120_000,
    "item": 90_000,
    "query": 60_000,
    "shop": 20_000,
    "brand": 8_000,
    "category": 1_200,
    "city": 400,
    "device": 60,
    "position": 40,
    "hour": 24,
}
NUMBERS = 6


class Impressions:
    """A log of impressions: ten ids, six numbers, whether clicked and whether then bought."""

    def __init__(self, rows, seed):
        rng = np.random.default_rng(seed)
        columns, offset = [], 0
        for size in FIELDS.values():
            popularity = rng.random(rows, dtype=np.float32) ** 2
            columns.append((popularity * (size - 1)).astype(np.int32) + offset)
            offset += size
        numbers = rng.standard_normal((rows, NUMBERS), dtype=np.float32)
        clicked = numbers[:, 0] + (columns[1] % 7 == 0) > 1.2
        self.ids = torch.from_numpy(np.stack(columns, axis=1))
        self.numbers = torch.from_numpy(numbers)
        self.clicked = torch.from_numpy(clicked.astype(np.float32))
        self.bought = torch.from_numpy((clicked & (numbers[:, 1] > 0.5)).astype(np.float32))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, rows):
        return self.ids[rows].long(), self.numbers[rows], self.clicked[rows], self.bought[rows]


def tower(width, hidden=(320, 160)):
    layers = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, 1))


class ESMM(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.table = nn.Embedding(sum(FIELDS.values()), dim, sparse=True)
        nn.init.normal_(self.table.weight, std=0.01)
        width = dim * len(FIELDS) + NUMBERS
        self.click = tower(width)
        self.buy = tower(width)

    def forward(self, ids, numbers):
        x = torch.cat([self.table(ids).flatten(1), numbers], dim=1)
        return self.click(x).squeeze(1), self.buy(x).squeeze(1)


def esmm_loss(click, buy, clicked, bought):
    both = torch.sigmoid(click) * torch.sigmoid(buy)
    click_loss = F.binary_cross_entropy_with_logits(click, clicked)
    return click_loss + F.binary_cross_entropy(both.clamp(1e-6, 1 - 1e-6), bought)


class Trainer:
    def __init__(self, model, data, batch_size, lr, log_every):
        self.model, self.data = model, data
        self.batch_size, self.log_every = batch_size, log_every
        self.optimizer = torch.optim.Adagrad(model.parameters(), lr=lr)
        self.running = torch.zeros(())

    def batches(self):
        while True:
            order = torch.randperm(len(self.data))
            for rows in order.split(self.batch_size):
                yield self.data[rows]

    def train_step(self, ids, numbers, clicked, bought):
        click, buy = self.model(ids, numbers)
        loss = esmm_loss(click, buy, clicked, bought)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def fit(self, steps):
        begun = time.time()
        batches = self.batches()
        for step in range(1, steps + 1):
            self.running += self.train_step(*next(batches))
            if step % self.log_every == 0:
                mean = self.running.item() / self.log_every
                print(f"[{time.time() - begun:7.1f} s] step {step}: loss {mean:.4f}", flush=True)
                self.running.zero_()


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=3072)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--rows", type=int, default=1_000_000)
    return parser.parse_args()


if __name__ == "__main__":
    args = parse()
    torch.manual_seed(11)
    trainer = Trainer(ESMM(), Impressions(args.rows, 11), args.batch_size, args.lr, log_every=50)
    trainer.fit(args.steps)
