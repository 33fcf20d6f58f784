"""Quantiles of the next day's load of electricity meters, from the week before."""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

METERS, HOURS = 400, 4 * 8760
PAST, AHEAD = 168, 24
QUANTILES = (0.1, 0.5, 0.9)


def prepare(path):
    """Write made-up readings of four years, one row for each meter."""
    if path.exists():
        return
    rng = np.random.default_rng(8)
    hour = np.arange(HOURS, dtype=np.float32)
    day = np.sin(2 * np.pi * hour / 24)
    week = np.sin(2 * np.pi * hour / 168)
    mix = rng.random((METERS, 2), dtype=np.float32)
    readings = 2 + mix @ np.stack([day, week]).astype(np.float32)
    readings += 0.2 * rng.standard_normal(readings.shape, dtype=np.float32)
    unfinished = path.with_name(f"{os.getpid()}-{path.name}")
    np.save(unfinished, readings)
    os.replace(unfinished, path)


def draw(readings, rng, batch):
    meters = rng.integers(0, len(readings), batch)
    starts = rng.integers(0, HOURS - PAST - AHEAD, batch)
    hours = starts[:, None] + np.arange(PAST + AHEAD)
    window = torch.from_numpy(readings[meters[:, None], hours])
    return window[:, :PAST], window[:, PAST:]


class Block(nn.Module):
    def __init__(self, channels, dilation):
        super().__init__()
        self.reach = 2 * dilation
        self.filter = nn.Conv1d(channels, channels, 3, dilation=dilation)
        self.mix = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        y = F.relu(self.filter(F.pad(x, (self.reach, 0))))
        return x + F.relu(self.mix(y))


class Forecaster(nn.Module):
    def __init__(self, channels, depth):
        super().__init__()
        self.stem = nn.Conv1d(1, channels, 1)
        self.blocks = nn.ModuleList(Block(channels, 2**i) for i in range(depth))
        self.head = nn.Linear(channels, AHEAD * len(QUANTILES))

    def forward(self, past):
        level = past.mean(dim=1, keepdim=True)
        x = self.stem((past - level).unsqueeze(1))
        for block in self.blocks:
            x = block(x)
        forecast = self.head(x[:, :, -1]).view(-1, len(QUANTILES), AHEAD)
        return forecast + level.unsqueeze(1)


def pinball(forecast, future):
    quantiles = torch.tensor(QUANTILES).view(1, -1, 1)
    error = future.unsqueeze(1) - forecast
    return torch.maximum(quantiles * error, (quantiles - 1) * error).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--channels", type=int, default=48)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--data", type=Path, default=Path("loads.npy"))
    args = parser.parse_args()

    torch.manual_seed(8)
    rng = np.random.default_rng(9)
    prepare(args.data)
    readings = np.load(args.data, mmap_mode="r")
    model = Forecaster(args.channels, args.depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)

    total = 0.0
    for step in range(args.steps):
        past, future = draw(readings, rng, args.batch)
        optimizer.zero_grad()
        loss = pinball(model(past), future)
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if (step + 1) % 40 == 0:
            print(f"{step + 1:6d}  pinball {total.item() / 40:.4f}")
            total = 0.0


if __name__ == "__main__":
    main()
