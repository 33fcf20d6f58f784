"""Trains a small model whose lines take known times: a program to be measured, with a stopwatch.

    python lines_program.py STOPWATCH

It trains until it is ended, and then writes into ``STOPWATCH`` when it logged: (begin, end) of
``time.perf_counter``.
"""

import atexit
import json
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

WIDTH = 768
logged: list[tuple[float, float]] = []


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        spin(0.00005)
        return torch.full((WIDTH,), row / 1e6), torch.zeros(1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.repeat(4, 1).requires_grad_()
        x = self.wide(x)
        return self.last(x.relu())[:64]


def weights_of(target: torch.Tensor) -> torch.Tensor:
    spin(0.002)
    return torch.ones_like(target)


def lookup(rows: torch.Tensor) -> torch.Tensor:
    spin(0.003)
    return rows.clone()


def log(step: int, loss: float) -> None:
    began = time.perf_counter()
    spin(0.012)
    logged.append((began, time.perf_counter()))


def evaluate(model: Model, rows: torch.Tensor) -> None:
    with torch.no_grad():
        spin(0.015)
        model(rows)


def helper() -> None:
    while True:
        time.sleep(0.05)
        spin(0.01)


def train(model: Model, optimizer: torch.optim.Optimizer) -> None:
    for step, (rows, target) in enumerate(DataLoader(Rows(), batch_size=64)):
        weight = weights_of(target)
        loss = nn.functional.binary_cross_entropy_with_logits(model(lookup(rows)), target, weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(step, loss.item())
        spin(0.004)
        if step % 4 == 0:
            evaluate(model, rows)


def write(file: str) -> None:
    Path(file).write_text(json.dumps(logged))


if __name__ == "__main__":
    torch.set_num_threads(1)
    atexit.register(write, sys.argv[1])
    threading.Thread(target=helper, name="helper", daemon=True).start()
    model = Model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.01))
