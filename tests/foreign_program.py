"""Trains a small recommender that knows nothing of the workbook: a program to be measured.

    python foreign_program.py STEPS [HOW]

``HOW`` spoils it: ``fail`` ends it with exit code 3 after its steps, ``still`` never steps an
optimizer, ``fork`` leaves the training to a process of its own, ``two`` trains in two processes,
``tiny`` steps an optimizer and does nothing else, ``killed`` ends it by a signal after its steps,
``left`` by ``os._exit``, ``asks`` reads standard input first, ``rank1`` fails on that rank,
``moves`` trains in a folder of its own that is gone when it ends, ``plain`` does nothing odd.
Whatever ``HOW`` is, the optimizer does not load torch's compiler, which would take most of the
program's time.
"""

import inspect
import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch


def make_batch(random: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A batch made sample by sample, which is slow."""
    bags = []
    for _ in range(4000):
        drawn = random.random(random.integers(1, 8))
        bags.append(np.unique((drawn * 999).astype(np.int64)))
    offsets = np.cumsum([0] + [len(bag) for bag in bags[:-1]])
    return torch.from_numpy(np.concatenate(bags)), torch.from_numpy(offsets), torch.rand(4000, 1)


class Uncompiled(torch.optim.SGD):
    """torch's optimizer without the wrappers that import ``torch._dynamo`` when they are called."""

    add_param_group = inspect.unwrap(torch.optim.SGD.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.SGD.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


def train(steps: int, how: str = "") -> None:
    random = np.random.default_rng(0)
    table = torch.nn.EmbeddingBag(1000, 32, mode="sum")
    mlp = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    made = Uncompiled if how else torch.optim.SGD
    optimizer = made([*table.parameters(), *mlp.parameters()], lr=0.1)
    for _ in range(steps):
        indices, offsets, target = make_batch(random)
        loss = torch.nn.functional.mse_loss(mlp(table(indices, offsets)), target)
        optimizer.zero_grad()
        loss.backward()
        if how != "still":
            optimizer.step()
    print("trained")


if __name__ == "__main__":
    steps, how = int(sys.argv[1]), (sys.argv[2:] or [""])[0]
    print("started in", Path.cwd(), flush=True)
    if how == "fork":
        if os.fork() == 0:
            train(steps, how)
    elif how == "two":
        context = multiprocessing.get_context("spawn")
        children = [context.Process(target=train, args=(steps, how)) for _ in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
    elif how == "tiny":
        weight = torch.nn.Parameter(torch.zeros(1))
        weight.grad = torch.ones(1)
        optimizer = Uncompiled([weight], lr=0.1)
        for _ in range(steps):
            optimizer.step()
    else:
        if how == "asks":
            input("train? ")
        if how == "moves":
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
                train(steps, how)
        else:
            train(steps, how)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "left":
            os._exit(0)
        if how == "rank1" and os.environ["RANK"] == "1":
            raise ValueError("no shard of rank 1")
        if how == "fail":
            print("ran out of luck", file=sys.stderr)
            sys.exit(3)
