"""Dual encoder: shoppers on one side, product titles (letter trigrams) on the other.

Negatives are the other products of the batch and the nearest products of an index that is encoded
anew now and then.
"""

import argparse
import math
import random
import zlib
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    steps: int = 100_000
    batch_size: int = 768
    shoppers: int = 80_000
    products: int = 6_000
    buckets: int = 4_096
    trigrams: int = 36
    dim: int = 64
    hidden: int = 512
    hard: int = 256
    refresh_every: int = 500
    log_every: int = 50
    lr: float = 1e-3
    warmup: int = 200
    temperature: float = 0.07
    seed: int = 11


class Catalogue:
    """Product titles and the trigram ids of each title, zero for no trigram."""

    SYLLABLES = "ka lo mi ner pol sta tri ven wex zu bar dim fol gan hes jor".split()

    def __init__(self, config: Config):
        self.config = config
        rng = random.Random(config.seed)
        words = ["".join(rng.choices(self.SYLLABLES, k=rng.randint(2, 3))) for _ in range(3000)]
        self.titles = [" ".join(rng.choices(words, k=6)) for _ in range(config.products)]
        self.codes = torch.tensor([self.trigram_ids(title) for title in self.titles])

    def trigram_ids(self, title: str) -> list[int]:
        ids = []
        for word in title.lower().split():
            marked = f"#{word}#"
            for start in range(len(marked) - 2):
                piece = marked[start : start + 3].encode()
                ids.append(1 + zlib.crc32(piece) % (self.config.buckets - 1))
        ids = ids[: self.config.trigrams]
        return ids + [0] * (self.config.trigrams - len(ids))

    def lookup(self, products: torch.Tensor) -> torch.Tensor:
        return self.codes[products]


def perceptron(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )


class DualEncoder(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.shopper = nn.Embedding(config.shoppers, config.dim, sparse=True)
        self.title = nn.EmbeddingBag(config.buckets, config.dim, mode="sum", padding_idx=0)
        self.shopper_net = perceptron(config.dim, config.hidden, config.dim)
        self.title_net = perceptron(config.dim, config.hidden, config.dim)

    def encode_shoppers(self, shoppers: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.shopper_net(self.shopper(shoppers)), dim=-1)

    def encode_products(self, codes: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.title_net(self.title(codes)), dim=-1)


class Trainer:
    def __init__(self, config: Config):
        self.config = config
        torch.manual_seed(config.seed)
        self.catalogue = Catalogue(config)
        self.model = DualEncoder(config)
        table = self.model.shopper.weight
        others = [p for p in self.model.parameters() if p is not table]
        self.optimizers = [
            torch.optim.AdamW(others, lr=config.lr),
            torch.optim.SparseAdam([table], lr=config.lr),
        ]
        self.schedulers = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate) for optimizer in self.optimizers
        ]
        self.index = None
        self.step = 0

    def rate(self, step: int) -> float:
        if step < self.config.warmup:
            return (step + 1) / self.config.warmup
        return max(0.1, math.sqrt(self.config.warmup / step))

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        shoppers = torch.randint(self.config.shoppers, (self.config.batch_size,))
        products = (shoppers * 7 + torch.randint(40, shoppers.shape)) % self.config.products
        return shoppers, products

    @torch.no_grad()
    def refresh_index(self) -> None:
        self.index = self.model.encode_products(self.catalogue.codes)

    @torch.no_grad()
    def nearest(self, vectors: torch.Tensor) -> torch.Tensor:
        best = (vectors[:64] @ self.index.T).amax(dim=0)
        return best.topk(self.config.hard).indices

    def train_step(self) -> torch.Tensor:
        if self.step % self.config.refresh_every == 0:
            self.refresh_index()
        shoppers, products = self.batch()
        left = self.model.encode_shoppers(shoppers)
        candidates = torch.cat([products, self.nearest(left)])
        right = self.model.encode_products(self.catalogue.lookup(candidates))
        scores = left @ right.T / self.config.temperature
        loss = F.cross_entropy(scores, torch.arange(len(scores)))
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer, scheduler in zip(self.optimizers, self.schedulers):
            optimizer.step()
            scheduler.step()
        self.step += 1
        return loss.detach()

    def fit(self) -> None:
        total = torch.zeros(())
        while self.step < self.config.steps:
            total += self.train_step()
            if self.step % self.config.log_every == 0:
                print(f"[{self.step}] loss={total.item() / self.config.log_every:.4f}")
                total.zero_()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=Config.steps)
    parser.add_argument("--batch-size", type=int, default=Config.batch_size)
    Trainer(Config(**vars(parser.parse_args()))).fit()
