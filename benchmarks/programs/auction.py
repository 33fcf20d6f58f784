"""A deep and cross network which predicts the clicks of a display-advertising auction."""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn

VOCABULARY = (300_000, 180_000, 60_000, 24_000, 6_000, 400)


@dataclass
class Config:
    rows: int = 150_000
    numeric: int = 64
    embedding: int = 16
    crosses: int = 2
    hidden: tuple = (512, 256)
    lr: float = 1e-3
    decay: float = 0.995
    seed: int = 77


def make_log(cfg):
    """Impressions: numeric features, row numbers in the joint table, and whether one clicked."""
    rng = np.random.default_rng(cfg.seed)
    columns = [rng.standard_normal(cfg.rows, dtype=np.float32) for _ in range(cfg.numeric)]
    numeric = np.stack(columns, axis=1)
    offsets = np.concatenate([[0], np.cumsum(VOCABULARY)[:-1]])
    codes = np.empty((cfg.rows, len(VOCABULARY)), dtype=np.int64)
    for field, size in enumerate(VOCABULARY):
        skewed = rng.random(cfg.rows) ** 3
        codes[:, field] = (skewed * size).astype(np.int64) + offsets[field]
    score = 0.8 * numeric[:, 0] - 0.6 * numeric[:, 1] * numeric[:, 2] + 0.5 * (codes[:, 5] % 3)
    clicks = (rng.random(cfg.rows) < 1 / (1 + np.exp(-score))).astype(np.float32)
    return numeric, codes, clicks


class Cross(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, first, x):
        return torch.addcmul(x, first, self.linear(x))


class DeepCross(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        width = cfg.numeric + cfg.embedding * len(VOCABULARY)
        self.table = nn.Embedding(sum(VOCABULARY), cfg.embedding, sparse=True)
        nn.init.normal_(self.table.weight, std=0.05)
        self.crosses = nn.ModuleList(Cross(width) for _ in range(cfg.crosses))
        sizes = (width, *cfg.hidden)
        deep = []
        for fan_in, fan_out in zip(sizes, sizes[1:]):
            deep += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        self.deep = nn.Sequential(*deep)
        self.head = nn.Linear(width + sizes[-1], 1)

    def forward(self, numeric, codes):
        first = torch.cat((numeric, self.table(codes).flatten(1)), dim=1)
        crossed = first
        for layer in self.crosses:
            crossed = layer(first, crossed)
        return self.head(torch.cat((crossed, self.deep(first)), dim=1)).squeeze(1)


def dense_parameters(model):
    return [weight for name, weight in model.named_parameters() if name != "table.weight"]


class Shadow:
    """A slow copy of weights, which serves the bids."""

    def __init__(self, weights, decay):
        self.weights, self.decay = weights, decay
        self.slow = [weight.detach().clone() for weight in weights]

    @torch.no_grad()
    def follow(self):
        torch._foreach_lerp_(self.slow, self.weights, 1 - self.decay)


def batches(log, size, seed):
    numeric, codes, clicks = log
    rng = np.random.default_rng(seed)
    while True:
        rows = rng.integers(0, len(clicks), size)
        yield tuple(torch.from_numpy(part[rows]) for part in (numeric, codes, clicks))


def snapshot(model, folder, step):
    torch.save({"step": step, "model": model.state_dict()}, folder / "auction.pt")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--save-every", type=int, default=5_000)
    args = parser.parse_args()

    cfg = Config()
    torch.manual_seed(cfg.seed)
    folder = Path(tempfile.mkdtemp(prefix="auction"))
    model = DeepCross(cfg)
    shadow = Shadow(dense_parameters(model), cfg.decay)
    adam = torch.optim.Adam(dense_parameters(model), lr=cfg.lr)
    lazy = torch.optim.SparseAdam([model.table.weight], lr=cfg.lr)
    criterion = nn.BCEWithLogitsLoss()
    smooth = None
    feed = batches(make_log(cfg), args.batch_size, cfg.seed + 1)
    for step, (numeric, codes, clicks) in zip(range(args.steps), feed):
        loss = criterion(model(numeric, codes), clicks)
        adam.zero_grad()
        lazy.zero_grad()
        loss.backward()
        adam.step()
        lazy.step()
        shadow.follow()
        smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
        if (step + 1) % args.save_every == 0:
            snapshot(model, folder, step)
        if step % 40 == 0:
            print(f"[{step:6d}] log loss {smooth:.4f}", flush=True)


if __name__ == "__main__":
    main()
