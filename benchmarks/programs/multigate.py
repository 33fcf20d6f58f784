"""Multi-gate mixture of experts for two tasks of a video feed: finish and share.

The vectors of the videos come from an earlier model and stay as they are. A step gathers the
gradients of several small batches before the optimizer moves.
"""
import argparse
from collections import deque
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class Sizes(NamedTuple):
    videos: int = 150_000
    content: int = 64
    people: int = 5_000
    context: int = 20
    features: int = 256
    expert: int = 320
    experts: int = 6


class Batch(NamedTuple):
    video: torch.Tensor
    person: torch.Tensor
    context: torch.Tensor
    finished: torch.Tensor
    shared: torch.Tensor


TASKS = ("finished", "shared")


class ContentEncoder(nn.Module):
    """What the earlier model knows of a video. Its weights are not trained here."""

    def __init__(self, sizes):
        super().__init__()
        self.vectors = nn.Embedding(sizes.videos, sizes.content)
        self.project = nn.Sequential(
            nn.Linear(sizes.content, 768),
            nn.Tanh(),
            nn.Linear(768, 768),
            nn.Tanh(),
            nn.Linear(768, sizes.features),
        )

    def forward(self, video):
        return self.project(self.vectors(video))


class Experts(nn.Module):
    def __init__(self, count, inputs, outputs):
        super().__init__()
        self.count = count
        self.first = nn.Linear(inputs, count * outputs)
        self.second = nn.Parameter(torch.randn(count, outputs, outputs) / outputs**0.5)

    def forward(self, x):
        hidden = torch.relu(self.first(x)).unflatten(1, (self.count, -1))
        return torch.relu(torch.bmm(hidden.transpose(0, 1), self.second))


class MultiGate(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.content = ContentEncoder(sizes)
        self.content.requires_grad_(False)
        self.person = nn.Embedding(sizes.people, 64)
        joint = sizes.features + 64 + sizes.context
        self.experts = Experts(sizes.experts, joint, sizes.expert)
        self.gates = nn.ModuleDict({task: nn.Linear(joint, sizes.experts) for task in TASKS})
        self.towers = nn.ModuleDict(
            {
                task: nn.Sequential(nn.Linear(sizes.expert, 128), nn.ReLU(), nn.Linear(128, 1))
                for task in TASKS
            }
        )

    def forward(self, batch):
        with torch.no_grad():
            content = self.content(batch.video)
        joint = torch.cat([content, self.person(batch.person), batch.context], dim=1)
        opinions = self.experts(joint)
        answers = {}
        for task in TASKS:
            weights = self.gates[task](joint).softmax(dim=1)
            mixed = (weights.T.unsqueeze(2) * opinions).sum(dim=0)
            answers[task] = self.towers[task](mixed).squeeze(1)
        return answers


class Feed:
    def __init__(self, rows, sizes):
        self.video = torch.randint(sizes.videos, (rows,))
        self.person = torch.randint(sizes.people, (rows,))
        self.context = torch.randn(rows, sizes.context)
        lean = self.context[:, :5].sum(1)
        self.finished = (lean + torch.randn(rows) > 0).float()
        self.shared = (lean + 2 * torch.randn(rows) > 2).float()
        self.rows = rows

    def draw(self, size):
        at = torch.randint(self.rows, (size,))
        return Batch(
            self.video[at],
            self.person[at],
            self.context[at],
            self.finished[at],
            self.shared[at],
        )


def task_losses(answers, batch):
    return {
        task: F.binary_cross_entropy_with_logits(answers[task], getattr(batch, task))
        for task in TASKS
    }


def one_step(model, optimizer, feed, micro_size, accumulate):
    optimizer.zero_grad()
    seen = 0.0
    for _ in range(accumulate):
        batch = feed.draw(micro_size)
        losses = task_losses(model(batch), batch)
        loss = (losses["finished"] + 0.5 * losses["shared"]) / accumulate
        loss.backward()
        seen = seen + loss.detach()
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 5.0)
    optimizer.step()
    return seen


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--micro-batch", type=int, default=320)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--report", type=int, default=40)
    args = parser.parse_args()

    torch.manual_seed(5)
    sizes = Sizes()
    model = MultiGate(sizes)
    trained = [p for name, p in model.named_parameters() if not name.startswith("content.")]
    optimizer = torch.optim.AdamW(trained, lr=3e-4, weight_decay=1e-4)
    feed = Feed(100_000, sizes)
    recent = deque(maxlen=args.report)
    for step in range(1, args.steps + 1):
        loss = one_step(model, optimizer, feed, args.micro_batch, args.accumulate)
        recent.append(loss)
        if step % args.report == 0:
            print(f"{step:>7} {torch.stack(list(recent)).mean().item():.4f}")


if __name__ == "__main__":
    main()
