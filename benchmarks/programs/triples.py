"""Link prediction in a knowledge graph: DistMult with negatives that a batch shares."""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

ENTITIES = 80_000
RELATIONS = 120


def make_triples(count, seed):
    rng = np.random.default_rng(seed)
    heads = (rng.random(count) ** 2 * ENTITIES).astype(np.int64)
    relations = rng.integers(0, RELATIONS, count)
    tails = (heads * 7 + relations * 31 + rng.integers(0, 5, count)) % ENTITIES
    return torch.from_numpy(np.stack([heads, relations, tails], axis=1))


class DistMult(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.entities = nn.Embedding(ENTITIES, dim, sparse=True)
        self.relations = nn.Embedding(RELATIONS, dim, sparse=True)
        nn.init.normal_(self.entities.weight, std=0.1)
        nn.init.normal_(self.relations.weight, std=0.5)

    def forward(self, triples, negatives):
        head = self.entities(triples[:, 0])
        relation = self.relations(triples[:, 1])
        tail = self.entities(triples[:, 2])
        others = self.entities(negatives)
        right = (head * relation * tail).sum(1, keepdim=True)
        wrong_tails = (head * relation) @ others.T
        wrong_heads = (tail * relation) @ others.T
        return right, wrong_tails, wrong_heads


def loss_of(right, wrong_tails, wrong_heads):
    target = torch.zeros(len(right), dtype=torch.long)
    tails = F.cross_entropy(torch.cat([right, wrong_tails], dim=1), target)
    heads = F.cross_entropy(torch.cat([right, wrong_heads], dim=1), target)
    return (tails + heads) / 2


class Sampler:
    def __init__(self, triples, size, negatives, seed):
        self.triples, self.size, self.negatives = triples, size, negatives
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self):
        rows = torch.randint(len(self.triples), (self.size,), generator=self.generator)
        negatives = torch.randint(ENTITIES, (self.negatives,), generator=self.generator)
        return self.triples[rows], negatives


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--negatives", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=128)
    args = parser.parse_args()

    torch.manual_seed(5)
    triples = make_triples(300_000, seed=5)
    sampler = Sampler(triples, args.batch, args.negatives, seed=6)
    model = DistMult(args.dim)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for step in range(args.steps):
        batch, negatives = sampler.draw()
        loss = loss_of(*model(batch, negatives))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"{step} {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
