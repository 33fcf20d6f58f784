"""Card payments: is one fraudulent, and what would it cost? A transformer over the columns."""

import argparse
import itertools
import time

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CATEGORIES = {"merchant": 4000, "country": 120, "channel": 6, "issuer": 300, "weekday": 7}
NUMBERS = ["amount", "balance", "age_days", "velocity", "distance", "hour"]


def make_frame(rows, seed):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({name: rng.integers(0, n, rows) for name, n in CATEGORIES.items()})
    for name in NUMBERS:
        frame[name] = rng.standard_normal(rows).astype(np.float32)
    odd = frame["amount"] + frame["velocity"] * (frame["channel"] == 2) + frame["distance"]
    frame["fraud"] = (odd + rng.standard_normal(rows) > 3).astype(np.float32)
    frame["cost"] = (frame["fraud"] * np.exp(frame["amount"] / 2)).astype(np.float32)
    return frame


class Payments(Dataset):
    def __init__(self, frame):
        self.categories = torch.from_numpy(frame[list(CATEGORIES)].to_numpy())
        self.numbers = torch.from_numpy(frame[NUMBERS].to_numpy())
        self.targets = torch.from_numpy(frame[["fraud", "cost"]].to_numpy())

    def __len__(self):
        return len(self.targets)

    def __getitems__(self, rows):
        rows = torch.as_tensor(rows)
        return self.categories[rows], self.numbers[rows], self.targets[rows]


class Columns(nn.Module):
    """Each column becomes a token, the first token is the one that is read out."""

    def __init__(self, dim):
        super().__init__()
        sizes = list(CATEGORIES.values())
        starts = [0, *itertools.accumulate(sizes)][:-1]
        self.register_buffer("starts", torch.tensor(starts))
        self.table = nn.Embedding(sum(sizes), dim)
        self.scale = nn.Parameter(torch.randn(len(NUMBERS), dim) * 0.1)
        self.shift = nn.Parameter(torch.zeros(len(NUMBERS), dim))
        self.readout = nn.Parameter(torch.zeros(1, 1, dim))

    def forward(self, categories, numbers):
        named = self.table(categories + self.starts)
        measured = numbers[:, :, None] * self.scale + self.shift
        return torch.cat([self.readout.expand(len(numbers), -1, -1), named, measured], dim=1)


class FraudNet(nn.Module):
    def __init__(self, dim=64, heads=4, depth=2):
        super().__init__()
        self.columns = Columns(dim)
        layer = nn.TransformerEncoderLayer(
            dim, heads, 2 * dim, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.is_fraud = nn.Linear(dim, 1)
        self.cost = nn.Linear(dim, 1)

    def forward(self, categories, numbers):
        first = self.blocks(self.columns(categories, numbers))[:, 0]
        return self.is_fraud(first).squeeze(1), self.cost(first).squeeze(1)


class Progress:
    def __init__(self, every):
        self.every, self.total = every, torch.zeros(2)
        self.began = time.perf_counter()

    def after_batch(self, trainer, parts):
        self.total += torch.stack([part.detach() for part in parts])
        if trainer.step % self.every == 0:
            bce, mse = (self.total / self.every).tolist()
            rate = trainer.step / (time.perf_counter() - self.began)
            print(f"step {trainer.step}: bce {bce:.4f} mse {mse:.4f} {rate:.1f} it/s", flush=True)
            self.total.zero_()


class Checkpoint:
    def __init__(self, path, every):
        self.path, self.every = path, every

    def after_batch(self, trainer, parts):
        if trainer.step % self.every == 0:
            self.save(trainer)

    def save(self, trainer):
        state = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
        torch.save(state, self.path)


class Trainer:
    def __init__(self, model, optimizer, callbacks):
        self.model, self.optimizer, self.callbacks = model, optimizer, callbacks
        self.bce, self.mse = nn.BCEWithLogitsLoss(), nn.MSELoss()
        self.step = 0

    def backward(self, parts):
        sum(parts).backward()

    def train_batch(self, categories, numbers, targets):
        fraud, cost = self.model(categories, numbers)
        parts = [self.bce(fraud, targets[:, 0]), self.mse(cost, targets[:, 1])]
        self.optimizer.zero_grad()
        self.backward(parts)
        self.optimizer.step()
        self.step += 1
        for callback in self.callbacks:
            callback.after_batch(self, parts)

    def fit(self, loader, steps):
        while self.step < steps:
            for batch in loader:
                self.train_batch(*batch)
                if self.step >= steps:
                    break


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=120_000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--save-every", type=int, default=5000)
    args = parser.parse_args()

    torch.manual_seed(3)
    payments = Payments(make_frame(args.rows, seed=4))
    loader = DataLoader(
        payments,
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=lambda batch: batch,
    )
    model = FraudNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    callbacks = [Progress(every=100), Checkpoint("fraud.pt", args.save_every)]
    Trainer(model, optimizer, callbacks).fit(loader, args.steps)


if __name__ == "__main__":
    main()
