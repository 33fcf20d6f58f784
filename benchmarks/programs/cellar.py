"""Two towers that recommend wines to drinkers, with in-batch and uniformly drawn negatives."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Config:
    drinkers: int = 300_000
    wines: int = 60_000
    regions: int = 500
    dim: int = 32
    width: int = 640
    history: int = 12
    batch: int = 768
    negatives: int = 512
    temperature: float = 0.1
    seed: int = 17


class Cellar:
    """Tastings and what is known of each wine, all of it in arrays."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.rng = np.random.default_rng(cfg.seed)
        self.region = self.rng.integers(0, cfg.regions, cfg.wines)
        self.measures = self.rng.standard_normal((cfg.wines, 8), dtype=np.float32)
        popular = 1 / np.arange(10, cfg.wines + 10) ** 0.7
        self.log_q = np.log(popular / popular.sum()).astype(np.float32)
        self.uniform = -np.log(cfg.wines)
        self.cumulative = np.cumsum(popular / popular.sum())
        self.drinker = self.rng.integers(0, cfg.drinkers, 300_000)
        self.wine = self.draw(300_000)
        self.past = self.draw(cfg.drinkers * cfg.history).reshape(cfg.drinkers, -1)

    def draw(self, count: int) -> np.ndarray:
        found = np.searchsorted(self.cumulative, self.rng.random(count))
        return np.minimum(found, self.cfg.wines - 1)

    def facts(self, wines: np.ndarray) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.region[wines]), torch.from_numpy(self.measures[wines])

    def batch(self):
        rows = self.rng.integers(0, len(self.drinker), self.cfg.batch)
        drinker, wine = self.drinker[rows], self.wine[rows]
        others = self.rng.integers(0, self.cfg.wines, self.cfg.negatives)
        candidates = np.concatenate([wine, others])
        log_q = np.concatenate([self.log_q[wine], np.full_like(self.log_q[others], self.uniform)])
        return (
            torch.from_numpy(drinker),
            torch.from_numpy(self.past[drinker]),
            torch.from_numpy(candidates),
            self.facts(candidates),
            torch.from_numpy(log_q),
        )


def mlp(inputs: int, cfg: Config) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, cfg.width),
        nn.ReLU(inplace=True),
        nn.Linear(cfg.width, cfg.width // 2),
        nn.ReLU(inplace=True),
        nn.Linear(cfg.width // 2, 64),
    )


class TwoTowers(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        self.drinkers = nn.Embedding(cfg.drinkers, cfg.dim, sparse=True)
        self.wines = nn.Embedding(cfg.wines, cfg.dim, sparse=True)
        self.tasted = nn.EmbeddingBag(cfg.wines, cfg.dim, mode="mean", sparse=True)
        self.regions = nn.Embedding(cfg.regions, 16)
        self.left = mlp(2 * cfg.dim, cfg)
        self.right = mlp(cfg.dim + 16 + 8, cfg)

    def query(self, drinker: Tensor, past: Tensor) -> Tensor:
        joined = torch.cat([self.drinkers(drinker), self.tasted(past)], dim=1)
        return F.normalize(self.left(joined), dim=1)

    def document(self, wine: Tensor, region: Tensor, measures: Tensor) -> Tensor:
        joined = torch.cat([self.wines(wine), self.regions(region), measures], dim=1)
        return F.normalize(self.right(joined), dim=1)


class Trainer:
    def __init__(self, cfg: Config):
        torch.manual_seed(cfg.seed)
        self.cfg = cfg
        self.cellar = Cellar(cfg)
        self.model = TwoTowers(cfg)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.01)
        self.targets = torch.arange(cfg.batch)

    def loss(self, drinker, past, candidates, facts, log_q) -> Tensor:
        queries = self.model.query(drinker, past)
        documents = self.model.document(candidates, *facts)
        scores = (queries / self.cfg.temperature) @ documents.T - log_q
        same = candidates[None, :] == candidates[: self.cfg.batch, None]
        same.fill_diagonal_(False)
        scores = scores.masked_fill(same, -1e4)
        return F.cross_entropy(scores, self.targets)

    def step(self) -> Tensor:
        loss = self.loss(*self.cellar.batch())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run(self, steps: int) -> None:
        for number in range(1, steps + 1):
            loss = self.step()
            if number % 100 == 0:
                print(f"{number:>7} loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    Trainer(Config()).run(parser.parse_args().steps)
