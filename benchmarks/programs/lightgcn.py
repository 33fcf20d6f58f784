# Recommendation by propagation over the user-item graph, with the BPR loss.
import argparse
from time import perf_counter

import numpy as np
import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100_000)
parser.add_argument("--users", type=int, default=5000)
parser.add_argument("--items", type=int, default=3000)
parser.add_argument("--dim", type=int, default=96)
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--batch", type=int, default=4096)
parser.add_argument("--decay", type=float, default=1e-4)
parser.add_argument("--report", type=int, default=100)


class Interactions:
    """Who bought what: popular items more often, each pair once."""

    def __init__(self, users, items, seed=11):
        rng = np.random.default_rng(seed)
        popularity = rng.zipf(1.3, items).clip(max=200).astype(float)
        pairs = np.stack(
            [
                rng.integers(0, users, 200_000),
                rng.choice(items, 200_000, p=popularity / popularity.sum()),
            ],
            axis=1,
        )
        self.num_users, self.num_items = users, items
        self.pairs = np.unique(pairs, axis=0)
        self.known = np.sort(self.pairs[:, 0] * items + self.pairs[:, 1])
        self.rng = rng

    def is_known(self, users, items):
        keys = users * self.num_items + items
        places = np.searchsorted(self.known, keys).clip(max=len(self.known) - 1)
        return self.known[places] == keys

    def draw_negatives(self, users):
        items = self.rng.integers(0, self.num_items, len(users))
        while (bad := self.is_known(users, items)).any():
            items[bad] = self.rng.integers(0, self.num_items, bad.sum())
        return items

    def sample(self, size):
        rows = self.pairs[self.rng.integers(0, len(self.pairs), size)]
        users, liked = rows[:, 0], rows[:, 1]
        negatives = self.draw_negatives(users)
        return torch.from_numpy(users), torch.from_numpy(liked), torch.from_numpy(negatives)


def normalised_adjacency(data):
    """D^-1/2 A D^-1/2 of the bipartite graph, which is symmetric."""
    users = torch.from_numpy(data.pairs[:, 0])
    items = torch.from_numpy(data.pairs[:, 1]) + data.num_users
    nodes = data.num_users + data.num_items
    rows, columns = torch.cat([users, items]), torch.cat([items, users])
    degree = torch.bincount(rows, minlength=nodes).clamp(min=1).float()
    weights = (degree[rows] * degree[columns]).rsqrt()
    matrix = torch.sparse_coo_tensor(torch.stack([rows, columns]), weights, (nodes, nodes))
    return matrix.coalesce().to_sparse_csr()


class Propagate(torch.autograd.Function):
    """Product with a symmetric sparse matrix."""

    @staticmethod
    def forward(ctx, matrix, x):
        ctx.matrix = matrix
        return matrix @ x

    @staticmethod
    def backward(ctx, grad):
        return None, ctx.matrix @ grad


class LightGCN(torch.nn.Module):
    def __init__(self, data, dim, layers):
        super().__init__()
        self.split = [data.num_users, data.num_items]
        self.layers = layers
        self.table = torch.nn.Parameter(0.1 * torch.randn(sum(self.split), dim))
        self.adjacency = normalised_adjacency(data)

    def forward(self):
        x = total = self.table
        for _ in range(self.layers):
            x = Propagate.apply(self.adjacency, x)
            total = total + x
        return (total / (self.layers + 1)).split(self.split)


def bpr(users, liked, others):
    return -F.logsigmoid((users * (liked - others)).sum(1)).mean()


def penalty(*vectors):
    return sum(v.square().sum() for v in vectors) / len(vectors[0])


def train(args):
    torch.manual_seed(11)
    data = Interactions(args.users, args.items)
    model = LightGCN(data, args.dim, args.layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    start = perf_counter()
    for step in range(args.steps):
        u, i, j = data.sample(args.batch)
        all_users, all_items = model()
        users, liked, others = all_users[u], all_items[i], all_items[j]
        loss = bpr(users, liked, others) + args.decay * penalty(users, liked, others)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.report == 0:
            print(f"step={step} loss={loss.item():.4f} seconds={perf_counter() - start:.1f}")


if __name__ == "__main__":
    train(parser.parse_args())
