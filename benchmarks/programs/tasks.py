"""Click, like and share of a video at once: a multi-gate mixture of experts (MMoE)."""

import argparse
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

TASKS = ("click", "like", "share")


@dataclass(frozen=True)
class Sizes:
    dense: int = 64
    fields: int = 6
    rows: int = 800
    dim: int = 16
    experts: int = 6
    hidden: int = 320
    out: int = 128


def expert(n_in, hidden, n_out):
    return nn.Sequential(nn.Linear(n_in, hidden), nn.ReLU(), nn.Linear(hidden, n_out), nn.ReLU())


class Mixture(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        width = sizes.dense + sizes.fields * sizes.dim
        self.tables = nn.Embedding(sizes.fields * sizes.rows, sizes.dim)
        self.experts = nn.ModuleList(
            expert(width, sizes.hidden, sizes.out) for _ in range(sizes.experts)
        )
        self.gates = nn.ModuleDict({task: nn.Linear(width, sizes.experts) for task in TASKS})
        self.towers = nn.ModuleDict(
            {
                task: nn.Sequential(nn.Linear(sizes.out, 64), nn.ReLU(), nn.Linear(64, 1))
                for task in TASKS
            }
        )

    def forward(self, dense, fields):
        x = torch.cat([dense, self.tables(fields).flatten(1)], dim=1)
        known = torch.stack([each(x) for each in self.experts], dim=1)
        answers = {}
        for task in TASKS:
            gate = self.gates[task](x).softmax(1)
            mixed = torch.bmm(gate[:, None], known).squeeze(1)
            answers[task] = self.towers[task](mixed).squeeze(1)
        return answers


class Videos:
    def __init__(self, count, sizes):
        self.dense = torch.randn(count, sizes.dense)
        self.fields = torch.randint(0, sizes.rows, (count, sizes.fields))
        self.fields += torch.arange(sizes.fields) * sizes.rows
        taste = self.dense[:, :3] + torch.randn(count, 3)
        self.labels = {task: (taste[:, i] > i / 2).float() for i, task in enumerate(TASKS)}

    def batch(self, rows):
        labels = {task: label[rows] for task, label in self.labels.items()}
        return self.dense[rows], self.fields[rows], labels


def task_losses(model, dense, fields, labels):
    answers = model(dense, fields)
    losses = [F.binary_cross_entropy_with_logits(answers[t], labels[t]) for t in TASKS]
    return torch.stack(losses)


def train(args):
    torch.manual_seed(23)
    sizes = Sizes()
    videos = Videos(40_000, sizes)
    model = Mixture(sizes)
    shared = [*model.experts.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    weights = torch.tensor([1.0, 0.7, 0.4])
    for step in range(args.steps):
        rows = torch.randint(0, len(videos.dense), (args.batch,))
        optimizer.zero_grad()
        for part in rows.split(args.part):
            losses = task_losses(model, *videos.batch(part))
            loss = (losses * weights).sum() * (len(part) / len(rows))
            loss.backward()
        nn.utils.clip_grad_norm_(shared, 5.0)
        optimizer.step()
        if step % 25 == 0:
            told = " ".join(f"{t} {v:.3f}" for t, v in zip(TASKS, losses.tolist()))
            print(f"{step:>6} {told}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--part", type=int, default=1024, help="rows of one backward pass")
    train(parser.parse_args())
