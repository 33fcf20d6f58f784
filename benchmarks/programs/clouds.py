"""An autoencoder of point clouds, coarse to fine, trained with the Chamfer distance."""

import argparse
import logging

import torch
import torch.nn as nn
from torch.nn.utils.parametrizations import spectral_norm

log = logging.getLogger("clouds")


def make_clouds(count, points, generator):
    """Ellipsoids and boxes of random size."""
    raw = torch.randn(count, points, 3, generator=generator)
    ball = raw / raw.norm(dim=2, keepdim=True)
    box = raw / raw.abs().amax(dim=2, keepdim=True)
    kind = torch.rand(count, 1, 1, generator=generator) < 0.5
    scale = 0.3 + 0.7 * torch.rand(count, 1, 3, generator=generator)
    return torch.where(kind, ball, box) * scale


def pick(points, index):
    return points.gather(1, index[..., None].expand(-1, -1, 3))


def chamfer(ours, theirs):
    """Mean squared distance to the nearest point, both ways."""
    with torch.no_grad():
        distances = torch.cdist(ours, theirs)
        to_theirs = distances.min(dim=2).indices
        to_ours = distances.min(dim=1).indices
    there = (ours - pick(theirs, to_theirs)).pow(2).sum(-1).mean()
    back = (theirs - pick(ours, to_ours)).pow(2).sum(-1).mean()
    return there + back


class Encoder(nn.Module):
    def __init__(self, latent):
        super().__init__()
        self.points = nn.Sequential(
            nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, latent)
        )

    def forward(self, cloud):
        return self.points(cloud).max(dim=1).values


class Decoder(nn.Module):
    def __init__(self, latent, coarse, fine):
        super().__init__()
        self.trunk = nn.Sequential(
            spectral_norm(nn.Linear(latent, 512)),
            nn.ReLU(),
            spectral_norm(nn.Linear(512, 512)),
            nn.ReLU(),
        )
        self.coarse = nn.Linear(512, coarse * 3)
        self.fine = nn.Linear(512, fine * 3)

    def forward(self, code):
        features = self.trunk(code)
        return (
            self.coarse(features).unflatten(1, (-1, 3)),
            self.fine(features).unflatten(1, (-1, 3)),
        )


class Autoencoder(nn.Module):
    def __init__(self, latent=256, coarse=64, fine=256):
        super().__init__()
        self.encoder = Encoder(latent)
        self.decoder = Decoder(latent, coarse, fine)

    def forward(self, cloud):
        code = self.encoder(cloud)
        return code, *self.decoder(code)


def get_losses(model, cloud):
    code, coarse, fine = model(cloud)
    return {
        "fine": chamfer(fine, cloud),
        "coarse": 0.5 * chamfer(coarse, cloud),
        "code": 1e-3 * code.pow(2).mean(),
    }


def train(opts):
    generator = torch.Generator().manual_seed(opts.seed)
    torch.manual_seed(opts.seed)
    clouds = make_clouds(4000, 256, generator)
    model = Autoencoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for iteration in range(opts.steps):
        cloud = clouds[torch.randint(len(clouds), (opts.batch,), generator=generator)]
        losses = get_losses(model, cloud)
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if iteration % 100 == 0:
            terms = ", ".join(f"{name} {value.item():.4f}" for name, value in losses.items())
            log.info("iteration %d: %s", iteration, terms)
    return model


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30_000)
    p.add_argument("--batch", type=int, default=48)
    p.add_argument("--seed", type=int, default=9)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train(p.parse_args())
