"""Neural matrix factorisation of implicit feedback, each pair with four drawn negatives."""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

USERS, ITEMS = 4000, 2500


class Factors(nn.Module):
    """A generalised matrix factorisation."""

    def __init__(self, dim):
        super().__init__()
        self.user = nn.Embedding(USERS, dim)
        self.item = nn.Embedding(ITEMS, dim)

    def forward(self, users, items):
        return self.user(users) * self.item(items)


class Perceptron(nn.Module):
    def __init__(self, dim, sizes):
        super().__init__()
        self.user = nn.Embedding(USERS, dim)
        self.item = nn.Embedding(ITEMS, dim)
        layers, width = [], 2 * dim
        for size in sizes:
            layers.extend([nn.Linear(width, size), nn.ReLU()])
            width = size
        self.layers = nn.Sequential(*layers)

    def forward(self, users, items):
        return self.layers(torch.cat([self.user(users), self.item(items)], dim=1))


class NeuralFactors(nn.Module):
    def __init__(self, dim=16, sizes=(256, 128, 32)):
        super().__init__()
        self.factors = Factors(dim)
        self.perceptron = Perceptron(dim, sizes)
        self.score = nn.Linear(dim + sizes[-1], 1)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.1)

    def forward(self, users, items):
        both = [self.factors(users, items), self.perceptron(users, items)]
        return self.score(torch.cat(both, dim=1)).squeeze(1)


class Feedback:
    def __init__(self, count, negatives, seed):
        self.rng = np.random.default_rng(seed)
        self.negatives = negatives
        self.users = self.rng.integers(0, USERS, count)
        self.items = (self.users // 4 + self.rng.integers(0, 300, count)) % ITEMS

    def epoch(self, size):
        order = self.rng.permutation(len(self.users))
        for first in range(0, len(order) - size + 1, size):
            rows = order[first : first + size]
            drawn = self.rng.integers(0, ITEMS, (size, self.negatives))
            users = np.repeat(self.users[rows], 1 + self.negatives)
            items = np.concatenate([self.items[rows, None], drawn], axis=1).ravel()
            yield torch.from_numpy(users), torch.from_numpy(items)


def fit(model, feedback, steps, size):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    labels = torch.zeros(size, 1 + feedback.negatives)
    labels[:, 0] = 1
    labels = labels.ravel()
    step = 0
    while True:
        for users, items in feedback.epoch(size):
            if step == steps:
                return
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(users, items), labels)
            loss.backward()
            optimizer.step()
            step += 1
            if step % 50 == 0:
                print(f"step {step}\tloss {loss.item():.5f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=2048)
    args = parser.parse_args()
    torch.manual_seed(12)
    fit(NeuralFactors(), Feedback(200_000, 4, seed=12), args.steps, args.batch)


if __name__ == "__main__":
    main()
