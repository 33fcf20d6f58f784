"""Kinds of cells from their neighbours: a graph network with mean messages over fixed edges."""

import argparse

import numpy as np
import torch
from torch import nn


def mean_edges(edges, count):
    """Edges without repeats and with one from each node to itself, and 1 / how many reach it."""
    loops = torch.arange(count).expand(2, -1)
    edges = torch.unique(torch.cat([edges, loops], dim=1), dim=1)
    degree = torch.bincount(edges[1], minlength=count)
    return edges[0], edges[1], 1 / degree[:, None]


class Messages(nn.Module):
    """Own features, and the mean over what the neighbours say, each with its matrix."""

    def __init__(self, n_in, n_out, said=64):
        super().__init__()
        self.own = nn.Linear(n_in, n_out)
        self.say = nn.Linear(n_in, said, bias=False)
        self.hear = nn.Linear(said, n_out, bias=False)
        self.norm = nn.LayerNorm(n_out)

    def forward(self, x, graph):
        source, target, weight = graph
        said = self.say(x)
        heard = torch.zeros_like(said).index_add(0, target, said.index_select(0, source)) * weight
        return torch.relu(self.norm(self.own(x) + self.hear(heard)))


class CellNet(nn.Module):
    def __init__(self, genes, width, depth, kinds):
        super().__init__()
        self.read = nn.Sequential(nn.Linear(genes, width), nn.ReLU())
        self.layers = nn.ModuleList(Messages(width, width) for _ in range(depth))
        self.head = nn.Linear(width, kinds)

    def forward(self, genes, graph):
        x = self.read(genes)
        for layer in self.layers:
            x = layer(x, graph)
        return self.head(x)


def tissue(cells, genes, kinds, seed):
    """Cells on a plane: near ones touch, and a kind fills a stripe of the plane."""
    rng = np.random.default_rng(seed)
    side = int(cells**0.5)
    cells = side * side
    kind = np.arange(cells) // side * kinds // side
    centres = rng.standard_normal((kinds, genes)) * 0.15
    values = centres[kind] + rng.standard_normal((cells, genes))
    numbers = np.arange(cells).reshape(side, side)
    across = np.stack([numbers[:, :-1].ravel(), numbers[:, 1:].ravel()])
    down = np.stack([numbers[:-1].ravel(), numbers[1:].ravel()])
    edges = np.concatenate([across, across[::-1], down, down[::-1]], axis=1)
    return (
        torch.from_numpy(values.astype(np.float32)),
        torch.from_numpy(edges),
        torch.from_numpy(kind),
    )


class Fit:
    def __init__(self, args):
        self.args = args
        self.genes, edges, self.kind = tissue(args.cells, 256, 8, seed=41)
        self.edges = edges
        self.graph = mean_edges(edges, len(self.kind))
        self.seen = torch.rand(len(self.kind)) < 0.6
        self.model = CellNet(256, args.width, args.depth, 8)
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=args.lr)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=20)

    def once(self):
        self.model.train()
        logits = self.model(self.genes, self.graph)
        loss = nn.functional.cross_entropy(logits[self.seen], self.kind[self.seen])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return logits.detach(), loss.detach()

    def __call__(self):
        for step in range(self.args.steps):
            logits, loss = self.once()
            if step % 30 == 0:
                right = logits.argmax(1) == self.kind
                self.plateau.step(loss)
                print(f"{step} loss {loss:.4f} unseen {right[~self.seen].float().mean():.3f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--cells", type=int, default=2500)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    torch.manual_seed(41)
    Fit(parser.parse_args())()


if __name__ == "__main__":
    main()
