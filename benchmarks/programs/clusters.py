"""Energies of small clusters of atoms by message passing over the pairs that are near."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CUTOFF = 2.0
SPECIES = 12


@dataclass
class Cluster:
    name: str
    species: Tensor
    position: Tensor
    pairs: Tensor
    energy: Tensor


@dataclass
class Batch:
    species: Tensor
    position: Tensor
    source: Tensor
    target: Tensor
    owner: Tensor
    energy: Tensor

    @property
    def size(self) -> int:
        return len(self.energy)


def near_pairs(position: Tensor) -> Tensor:
    distance = torch.cdist(position, position)
    distance.fill_diagonal_(float("inf"))
    return (distance < CUTOFF).nonzero().T.contiguous()


def simulate(count: int, generator: torch.Generator) -> list[Cluster]:
    clusters = []
    for number in range(count):
        atoms = int(torch.randint(10, 25, (), generator=generator))
        position = torch.rand(atoms, 3, generator=generator) * 4.0
        species = torch.randint(0, SPECIES, (atoms,), generator=generator)
        pairs = near_pairs(position)
        length = (position[pairs[0]] - position[pairs[1]]).norm(dim=1)
        energy = torch.exp(-length).sum() / atoms
        clusters.append(Cluster(f"cluster-{number:05d}", species, position, pairs, energy))
    return clusters


def join(clusters: list[Cluster]) -> Batch:
    counts = torch.tensor([len(cluster.species) for cluster in clusters])
    first = torch.cumsum(counts, 0) - counts
    links = torch.tensor([cluster.pairs.shape[1] for cluster in clusters])
    pairs = torch.cat([cluster.pairs for cluster in clusters], dim=1)
    pairs = pairs + torch.repeat_interleave(first, links)
    return Batch(
        species=torch.cat([cluster.species for cluster in clusters]),
        position=torch.cat([cluster.position for cluster in clusters]),
        source=pairs[0],
        target=pairs[1],
        owner=torch.repeat_interleave(torch.arange(len(clusters)), counts),
        energy=torch.stack([cluster.energy for cluster in clusters]),
    )


def draw(clusters: list[Cluster], size: int, generator: torch.Generator) -> Iterator[Batch]:
    while True:
        order = torch.randperm(len(clusters), generator=generator).tolist()
        for start in range(0, len(order) - size + 1, size):
            batch = join([clusters[i] for i in order[start : start + size]])
            batch.position += 0.02 * torch.randn(batch.position.shape, generator=generator)
            yield batch


class Interaction(nn.Module):
    def __init__(self, width: int, radial: int) -> None:
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(radial, width), nn.SiLU(), nn.Linear(width, width))
        self.before = nn.Linear(width, width, bias=False)
        self.after = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, atoms: Tensor, radial: Tensor, batch: Batch) -> Tensor:
        messages = self.before(atoms)[batch.source] * self.filter(radial)
        heard = torch.zeros_like(atoms).index_add(0, batch.target, messages)
        return atoms + self.after(heard)


class Potential(nn.Module):
    def __init__(self, width: int = 64, radial: int = 20, depth: int = 3) -> None:
        super().__init__()
        self.species = nn.Embedding(SPECIES, width)
        self.register_buffer("centres", torch.linspace(0.0, CUTOFF, radial))
        self.layers = nn.ModuleList(Interaction(width, radial) for _ in range(depth))
        self.readout = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, batch: Batch) -> Tensor:
        step = batch.position[batch.source] - batch.position[batch.target]
        distance = step.square().sum(1, keepdim=True).sqrt()
        radial = torch.exp(-8.0 * (distance - self.centres).square())
        atoms = self.species(batch.species)
        for layer in self.layers:
            atoms = layer(atoms, radial, batch)
        each = self.readout(atoms).squeeze(1)
        return torch.zeros(batch.size).index_add(0, batch.owner, each)

    def stiffness(self) -> Tensor:
        """Keeps the maps between layers from growing."""
        maps = [module.weight for module in self.modules() if isinstance(module, nn.Linear)]
        return sum(weight.square().sum() for weight in maps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--clusters", type=int, default=3_000)
    options = parser.parse_args()

    torch.manual_seed(31)
    generator = torch.Generator().manual_seed(31)
    clusters = simulate(options.clusters, generator)
    potential = Potential()
    optimizer = torch.optim.NAdam(potential.parameters(), lr=5e-4)
    for step, batch in enumerate(draw(clusters, options.batch_size, generator)):
        if step == options.steps:
            break
        error = (potential(batch) - batch.energy).abs().mean()
        loss = error + 1e-5 * potential.stiffness()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: mean error {error.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
