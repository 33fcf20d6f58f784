"""GraphSAGE on a random graph, two hops of sampled neighbours."""

import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class Graph:
    """Neighbours in compressed rows, with features and a class for each node."""

    def __init__(self, nodes, width, classes, seed):
        rng = np.random.default_rng(seed)
        self.degree = rng.integers(3, 30, nodes)
        self.first = np.concatenate([[0], np.cumsum(self.degree)[:-1]])
        self.neighbours = rng.integers(0, nodes, self.degree.sum())
        self.labels = torch.from_numpy(rng.integers(0, classes, nodes))
        centres = rng.standard_normal((classes, width))
        noise = rng.standard_normal((nodes, width))
        x = (centres[self.labels.numpy()] + noise).astype(np.float32)
        self.x = torch.from_numpy((x - x.mean(0)) / x.std(0))

    def sample(self, nodes, fanout, rng):
        pick = (rng.random((len(nodes), fanout)) * self.degree[nodes, None]).astype(np.int64)
        return self.neighbours[self.first[nodes, None] + pick].reshape(-1)


class SageLayer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own = nn.Linear(inputs, outputs)
        self.near = nn.Linear(inputs, outputs, bias=False)

    def forward(self, own, near):
        mean = near.view(len(own), -1, near.shape[1]).mean(1)
        return self.own(own) + self.near(mean)


class Sage(nn.Module):
    def __init__(self, width, hidden, classes):
        super().__init__()
        self.project = nn.Linear(width, hidden)
        self.lower = SageLayer(hidden, hidden)
        self.upper = SageLayer(hidden, classes)

    def forward(self, x0, x1, x2):
        x0, x1, x2 = (F.relu(self.project(x)) for x in (x0, x1, x2))
        h0 = F.relu(self.lower(x0, x1))
        h1 = F.relu(self.lower(x1, x2))
        return self.upper(h0, h1)


def fetch(graph, seeds, fanouts, rng):
    hop1 = graph.sample(seeds, fanouts[0], rng)
    hop2 = graph.sample(hop1, fanouts[1], rng)
    return [graph.x[torch.from_numpy(ids)] for ids in (seeds, hop1, hop2)]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=100_000)
    p.add_argument("--batch-size", type=int, default=512)
    p.add_argument("--hidden", type=int, default=192)
    args = p.parse_args()

    torch.manual_seed(3)
    rng = np.random.default_rng(3)
    graph = Graph(60_000, width=96, classes=40, seed=3)
    net = Sage(96, args.hidden, 40)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for it in range(args.steps):
        seeds = rng.integers(0, len(graph.degree), args.batch_size)
        x0, x1, x2 = fetch(graph, seeds, (8, 5), rng)
        out = net(x0, x1, x2)
        loss = F.cross_entropy(out, graph.labels[torch.from_numpy(seeds)])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if it % 40 == 0:
            print("iter", it, "loss", round(loss.item(), 4), flush=True)


if __name__ == "__main__":
    main()
