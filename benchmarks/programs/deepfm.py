"""DeepFM: a factorization machine and a deep network over the same embeddings."""

import argparse

import numpy as np
import torch
from torch import nn

FIELDS = [400] * 20 + [3000] * 6


class DeepFM(nn.Module):
    def __init__(self, fields, dim=16, hidden=(512, 512, 256)):
        super().__init__()
        offsets = np.concatenate([[0], np.cumsum(fields)[:-1]])
        self.register_buffer("offsets", torch.from_numpy(offsets))
        self.linear = nn.Embedding(sum(fields), 1)
        self.factors = nn.Embedding(sum(fields), dim)
        layers, width = [], dim * len(fields)
        for size in hidden:
            layers += [nn.Linear(width, size), nn.BatchNorm1d(size), nn.ReLU()]
            width = size
        self.deep = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, x):
        x = x + self.offsets
        factors = self.factors(x)
        square_of_sum = factors.sum(1).pow(2)
        sum_of_square = factors.pow(2).sum(1)
        fm = 0.5 * (square_of_sum - sum_of_square).sum(1)
        deep = self.deep(factors.flatten(1)).squeeze(1)
        return self.linear(x).sum((1, 2)) + fm + deep


def dataset(rows, seed):
    rng = np.random.default_rng(seed)
    x = np.stack([rng.integers(0, n, rows) for n in FIELDS], axis=1)
    y = ((x[:, 0] + x[:, 21] + rng.integers(0, 800, rows)) % 1000 < 300).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(y)


def auc(scores, labels):
    order = np.argsort(scores)
    ranks = np.empty(len(scores))
    ranks[order] = np.arange(1, len(scores) + 1)
    positives = labels.sum()
    area = ranks[labels > 0].sum() - positives * (positives + 1) / 2
    return area / max(positives * (len(labels) - positives), 1)


class Trainer:
    def __init__(self, args):
        torch.manual_seed(args.seed)
        self.args = args
        self.x, self.y = dataset(50_000, args.seed)
        self.model = DeepFM(FIELDS)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.02)
        self.criterion = nn.BCEWithLogitsLoss()
        self.scores, self.labels = [], []

    def train_step(self, step):
        first = step * self.args.batch % (len(self.y) - self.args.batch)
        x, y = (each[first : first + self.args.batch] for each in (self.x, self.y))
        logits = self.model(x)
        loss = self.criterion(logits, y)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach(), logits.detach(), y

    def report(self, logits, y):
        return auc(logits.numpy(), y.numpy())

    def fit(self):
        for step in range(self.args.steps):
            loss, logits, y = self.train_step(step)
            if step % 50 == 49:
                area = self.report(logits, y)
                print(f"step={step + 1} loss={loss.item():.4f} auc={area:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=5)
    Trainer(parser.parse_args()).fit()
