"""Solubility of made-up molecules: message passing over batches of small graphs."""

import argparse
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

ATOMS = 16
BONDS = 4
HIDDEN = 160


@dataclass
class Molecule:
    atoms: np.ndarray
    bonds: np.ndarray  # source, target, kind; both directions
    solubility: float


def make_molecule(rng):
    """A tree of atoms, some of it closed to rings."""
    size = int(rng.integers(10, 26))
    atoms = rng.integers(0, ATOMS, size)
    parents = np.maximum(0, np.arange(1, size) - rng.integers(1, 4, size - 1))
    rings = rng.integers(0, size, (2, size // 6))
    ends = np.concatenate([np.stack([np.arange(1, size), parents]), rings], axis=1)
    kinds = rng.integers(0, BONDS, ends.shape[1])
    bonds = np.concatenate([ends, ends[::-1]], axis=1)
    bonds = np.concatenate([bonds, np.concatenate([kinds, kinds])[None]])
    polar = (atoms < 5).mean() - 0.1 * (kinds == 2).mean()
    return Molecule(atoms, bonds, float(polar + 0.05 * rng.standard_normal()))


class Molecules(Dataset):
    def __init__(self, count, seed):
        rng = np.random.default_rng(seed)
        self.molecules = [make_molecule(rng) for _ in range(count)]

    def __len__(self):
        return len(self.molecules)

    def __getitem__(self, i):
        return self.molecules[i]


@dataclass
class Batch:
    atoms: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor
    kind: torch.Tensor
    graph: torch.Tensor
    graphs: int
    solubility: torch.Tensor


def collate(molecules):
    """One graph of many parts; atoms are numbered through."""
    sizes = np.array([len(m.atoms) for m in molecules])
    counts = [m.bonds.shape[1] for m in molecules]
    first = np.repeat(np.cumsum(sizes) - sizes, counts)
    bonds = torch.from_numpy(np.concatenate([m.bonds for m in molecules], axis=1))
    shift = torch.from_numpy(first)
    return Batch(
        atoms=torch.from_numpy(np.concatenate([m.atoms for m in molecules])),
        source=bonds[0] + shift,
        target=bonds[1] + shift,
        kind=bonds[2],
        graph=torch.from_numpy(np.repeat(np.arange(len(molecules)), sizes)),
        graphs=len(molecules),
        solubility=torch.tensor([m.solubility for m in molecules]),
    )


class Layer(nn.Module):
    """Sum over neighbours, weighed by the kind of bond, then a two-layer net."""

    def __init__(self):
        super().__init__()
        self.strength = nn.Parameter(torch.ones(BONDS))
        self.update = nn.Sequential(
            nn.Linear(HIDDEN, 2 * HIDDEN), nn.ReLU(), nn.Linear(2 * HIDDEN, HIDDEN)
        )
        self.norm = nn.LayerNorm(HIDDEN)

    def gather(self, h, batch):
        messages = h[batch.source] * self.strength[batch.kind].unsqueeze(1)
        return torch.zeros_like(h).index_add(0, batch.target, messages)

    def forward(self, h, batch):
        return self.norm(h + self.update(h + self.gather(h, batch)))


class Net(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.atoms = nn.Embedding(ATOMS, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.head = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def readout(self, h, batch):
        total = torch.zeros(batch.graphs, HIDDEN).index_add(0, batch.graph, h)
        return total / torch.bincount(batch.graph, minlength=batch.graphs).unsqueeze(1)

    def forward(self, batch):
        h = self.atoms(batch.atoms)
        for layer in self.layers:
            h = layer(h, batch)
        return self.head(self.readout(h, batch)).squeeze(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--molecules", type=int, default=12_800)
    parser.add_argument("--depth", type=int, default=5)
    args = parser.parse_args()

    torch.manual_seed(11)
    loader = DataLoader(
        Molecules(args.molecules, seed=11),
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
    )
    net = Net(args.depth)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-4)
    step, smooth = 0, None
    while step < args.steps:
        for batch in loader:
            loss = nn.functional.smooth_l1_loss(net(batch), batch.solubility)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            optimizer.step()
            step += 1
            if step % 30 == 0:
                value = loss.item()
                smooth = value if smooth is None else 0.9 * smooth + 0.1 * value
                print(f"step {step} loss {smooth:.5f}", flush=True)
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
