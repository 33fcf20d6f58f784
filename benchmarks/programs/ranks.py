"""A click model on several processes: torchrun --nproc-per-node=2 ranks.py"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self, rows=2000, fields=10, dim=16):
        super().__init__()
        self.table = nn.Embedding(rows * fields, dim)
        self.register_buffer("first", torch.arange(fields) * rows)
        self.layers = nn.Sequential(
            nn.Linear(fields * dim, 512),
            nn.ReLU(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, 1),
        )

    def forward(self, ids):
        return self.layers(self.table(ids + self.first).flatten(1)).squeeze(1)


def batches(size, generator):
    pool = torch.randint(0, 2000, (40_000, 10), generator=generator)
    labels = (pool[:, 0] % 2).float()
    while True:
        rows = torch.randint(0, len(pool), (size,), generator=generator)
        yield pool[rows], labels[rows]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=1024)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // dist.get_world_size()))
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    criterion = nn.BCEWithLogitsLoss()
    generator = torch.Generator().manual_seed(rank)
    size = args.batch_size
    for step, (ids, labels) in enumerate(batches(size, generator)):
        if step == args.steps:
            break
        loss = criterion(model(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
