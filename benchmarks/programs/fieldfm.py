"""Factorisation machine with a deep part on adverts with many categorical fields."""

from __future__ import annotations

import argparse
import logging
import time

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

log = logging.getLogger("fieldfm")

FIELDS = {
    "site": 30_000,
    "domain": 24_000,
    "app": 40_000,
    "category": 40,
    "device": 60_000,
    "model": 7_000,
    "hour": 24,
    "size": 12,
    "advertiser": 9_000,
    "campaign": 35_000,
    "creative": 80_000,
    "language": 90,
    "region": 400,
    "city": 11_000,
    "system": 30,
    "segment": 2_000,
}
NUMBERS = 12


class Impressions(Dataset):
    """Impressions in memory; an index may be a list of rows, which gives a whole batch."""

    def __init__(self, count: int, seed: int):
        maker = torch.Generator().manual_seed(seed)
        columns = [torch.randint(n, (count,), generator=maker) for n in FIELDS.values()]
        self.fields = torch.stack(columns, dim=1)
        self.numbers = torch.randn(count, NUMBERS, generator=maker)
        odds = self.numbers[:, :4].sum(1) + (self.fields[:, 3] % 5 - 2)
        self.clicked = (odds + torch.randn(count, generator=maker) > 0).float()

    def __len__(self) -> int:
        return len(self.clicked)

    def __getitem__(self, rows):
        return self.fields[rows], self.numbers[rows], self.clicked[rows]


class FieldEmbeddings(nn.Module):
    def __init__(self, sizes: list[int], dim: int):
        super().__init__()
        self.tables = nn.ModuleList()
        for size in sizes:
            table = nn.Embedding(size, dim, sparse=True)
            nn.init.normal_(table.weight, std=0.05)
            self.tables.append(table)

    def forward(self, fields: Tensor) -> Tensor:
        columns = [table(fields[:, i]) for i, table in enumerate(self.tables)]
        return torch.stack(columns, dim=1)


class PairInteraction(nn.Module):
    """Sum of the products of all pairs of fields."""

    def forward(self, vectors: Tensor) -> Tensor:
        square_of_sum = vectors.sum(dim=1).square()
        sum_of_squares = vectors.square().sum(dim=1)
        return 0.5 * (square_of_sum - sum_of_squares).sum(dim=1)


class DeepFM(nn.Module):
    def __init__(self, dim: int = 16, width: int = 640):
        super().__init__()
        sizes = list(FIELDS.values())
        self.embed = FieldEmbeddings(sizes, dim)
        self.pairs = PairInteraction()
        self.linear = nn.Linear(NUMBERS, 1)
        self.deep = nn.Sequential(
            nn.Linear(len(sizes) * dim + NUMBERS, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )

    def forward(self, fields: Tensor, numbers: Tensor) -> Tensor:
        vectors = self.embed(fields)
        deep = self.deep(torch.cat([vectors.flatten(1), numbers], dim=1))
        return (deep + self.linear(numbers)).squeeze(1) + self.pairs(vectors)


def make_loader(data: Impressions, batch_size: int) -> DataLoader:
    batches = BatchSampler(RandomSampler(data), batch_size, drop_last=True)
    return DataLoader(data, sampler=batches, batch_size=None)


def endless(loader: DataLoader):
    while True:
        yield from loader


def train(model: DeepFM, loader: DataLoader, steps: int, log_every: int) -> None:
    tables = torch.optim.SGD(model.embed.parameters(), lr=0.5)
    rest = [p for name, p in model.named_parameters() if not name.startswith("embed.")]
    adam = torch.optim.Adam(rest, lr=1e-3)
    objective = nn.BCEWithLogitsLoss()
    since = time.perf_counter()
    for step, (fields, numbers, clicked) in zip(range(1, steps + 1), endless(loader)):
        logits = model(fields, numbers)
        loss = objective(logits, clicked)
        tables.zero_grad()
        adam.zero_grad()
        loss.backward()
        tables.step()
        adam.step()
        if step % log_every == 0:
            spent = time.perf_counter() - since
            log.info("step %d loss %.4f %.1f ms/step", step, loss.item(), 1e3 * spent / step)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--steps", type=int, default=200_000)
    cli.add_argument("--batch-size", type=int, default=1400)
    cli.add_argument("--log-every", type=int, default=50)
    args = cli.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(7)
    loader = make_loader(Impressions(80_000, seed=7), args.batch_size)
    train(DeepFM(), loader, args.steps, args.log_every)


if __name__ == "__main__":
    main()
