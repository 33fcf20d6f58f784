"""Clicks from eight categorical fields: a deep and cross network, fed by a background thread."""

import argparse
import queue
import threading
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn


@dataclass
class Settings:
    fields: int = 8
    rows: int = 500
    dim: int = 8
    depth: int = 2
    hidden: tuple = (768, 512, 256)
    batch: int = 2048
    lr: float = 2e-3
    ahead: int = 4


class CrossLayers(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.weights = nn.ModuleList(nn.Linear(width, 1, bias=False) for _ in range(depth))
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(depth))

    def forward(self, first):
        x = first
        for weight, bias in zip(self.weights, self.biases):
            x = first * weight(x) + bias + x
        return x


class DeepCross(nn.Module):
    def __init__(self, settings):
        super().__init__()
        width = settings.fields * settings.dim
        starts = torch.arange(settings.fields) * settings.rows
        self.register_buffer("starts", starts)
        self.table = nn.Embedding(settings.fields * settings.rows, settings.dim)
        self.cross = CrossLayers(width, settings.depth)
        sizes = [width, *settings.hidden]
        self.deep = nn.Sequential(
            *[
                layer
                for n_in, n_out in zip(sizes, sizes[1:])
                for layer in (nn.Linear(n_in, n_out), nn.ReLU())
            ]
        )
        self.out = nn.Linear(width + sizes[-1], 1)

    def forward(self, ids):
        embedded = self.table(ids + self.starts).flatten(1)
        return self.out(torch.cat([self.cross(embedded), self.deep(embedded)], dim=1)).squeeze(1)


class Feed:
    """Batches of the click log, made in a thread while the last one trains."""

    def __init__(self, ids, clicks, batch, ahead):
        self.ids, self.clicks, self.batch = ids, clicks, batch
        self.ready = queue.Queue(maxsize=ahead)
        threading.Thread(target=self.fill, daemon=True).start()

    def fill(self):
        rng = np.random.default_rng(3)
        while True:
            rows = rng.integers(0, len(self.clicks), self.batch)
            made = torch.from_numpy(self.ids[rows]), torch.from_numpy(self.clicks[rows])
            self.ready.put(made)

    def __next__(self):
        return self.ready.get()


def click_log(settings, size=60_000):
    rng = np.random.default_rng(2)
    ids = rng.integers(0, settings.rows, (size, settings.fields))
    clicks = (ids[:, 0] * 3 + ids[:, 1] * ids[:, 2] % 97 > 700).astype(np.float32)
    return ids, clicks


def make_stepper(model, settings):
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr, fused=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=400, gamma=0.8)
    criterion = nn.BCEWithLogitsLoss()

    def step(ids, clicks):
        optimizer.zero_grad()
        loss = criterion(model(ids), clicks)
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.detach()

    return step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    args = parser.parse_args()

    torch.manual_seed(1)
    settings = Settings()
    feed = Feed(*click_log(settings), settings.batch, settings.ahead)
    step = make_stepper(DeepCross(settings), settings)
    for number in range(args.steps):
        loss = step(*next(feed))
        if number % 40 == 0:
            print(f"{number:6d}  logloss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
