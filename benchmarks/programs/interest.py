"""Deep interest network: what a user has looked at, weighed against the item that is offered."""

import argparse
import logging

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

ITEMS = 12_000
CATEGORIES = 300
USERS = 5_000
LONGEST = 30

log = logging.getLogger("din")


class Offers(Dataset):
    def __init__(self, rows, seed):
        rng = np.random.default_rng(seed)
        histories = rng.integers(1, ITEMS, (USERS, LONGEST))
        lengths = rng.integers(LONGEST - 4, LONGEST + 1, USERS)
        histories[np.arange(LONGEST) >= lengths[:, None]] = 0
        self.user = rng.integers(0, USERS, rows)
        self.item = rng.integers(1, ITEMS, rows)
        alike = (histories[self.user] % 13 == self.item[:, None] % 13).sum(1)
        self.label = (alike + rng.random(rows) > 3).astype(np.float32)
        self.histories = histories

    def __len__(self):
        return len(self.label)

    def __getitem__(self, index):
        user = self.user[index]
        return self.histories[user], self.item[index], self.label[index]


def collate(samples):
    history, item, label = zip(*samples)
    return (
        torch.from_numpy(np.stack(history)),
        torch.from_numpy(np.array(item)),
        torch.from_numpy(np.array(label)),
    )


class TargetAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.score = nn.Sequential(
            nn.Linear(4 * width, 80), nn.SiLU(), nn.Linear(80, 40), nn.SiLU(), nn.Linear(40, 1)
        )

    def forward(self, target, past, mask):
        target = target.unsqueeze(1).expand_as(past)
        pairs = torch.cat([target, past, target - past, target * past], dim=-1)
        score = self.score(pairs).squeeze(-1).masked_fill(~mask, -1e9)
        return torch.bmm(score.softmax(-1).unsqueeze(1), past).squeeze(1)


class DIN(nn.Module):
    def __init__(self, dim=24, hidden=200):
        super().__init__()
        category_of = torch.arange(ITEMS) % (CATEGORIES - 1) + 1
        category_of[0] = 0
        self.register_buffer("category_of", category_of)
        self.items = nn.Embedding(ITEMS, dim)
        self.categories = nn.Embedding(CATEGORIES, dim)
        self.attention = TargetAttention(2 * dim)
        self.head = nn.Sequential(
            nn.Linear(4 * dim, hidden),
            nn.SiLU(),
            nn.Linear(hidden, 80),
            nn.SiLU(),
            nn.Linear(80, 1),
        )

    def embed(self, item):
        category = self.category_of[item]
        return torch.cat([self.items(item), self.categories(category)], dim=-1)

    def forward(self, history, item):
        target = self.embed(item)
        interest = self.attention(target, self.embed(history), history > 0)
        return self.head(torch.cat([interest, target], dim=-1)).squeeze(-1)


def make_loader(options):
    return DataLoader(
        Offers(200_000, options.seed),
        batch_size=options.batch,
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
    )


def endless(loader):
    while True:
        yield from loader


def train(options):
    torch.manual_seed(options.seed)
    loader = make_loader(options)
    model = DIN()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    criterion = nn.BCEWithLogitsLoss()
    stream = endless(loader)
    model.train()
    for step in range(options.steps):
        history, item, label = next(stream)
        logits = model(history, item)
        loss = criterion(logits, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % options.print_freq == 0:
            log.info("step %d loss %.4f", step, loss.item())
    return model


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=100_000)
    cli.add_argument("--batch", type=int, default=512)
    cli.add_argument("--lr", type=float, default=1e-3)
    cli.add_argument("--workers", type=int, default=1)
    cli.add_argument("--seed", type=int, default=3)
    cli.add_argument("--print-freq", type=int, default=50)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    train(cli.parse_args())
