"""A small convolutional autoencoder with a codebook (VQ-VAE) on generated tiles."""
import argparse
import itertools
import os

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

SIDE = 32


class Tiles(Dataset):
    """Noisy stripes and blobs; an item is a whole batch of tiles."""

    def __init__(self, batches, batch_size):
        self.batches = batches
        self.batch_size = batch_size
        y, x = np.mgrid[0:SIDE, 0:SIDE].astype(np.float32) / SIDE
        self.grid = np.stack([x, y])

    def __len__(self):
        return self.batches

    def __getitem__(self, i):
        rng = np.random.default_rng(i)
        wave = rng.uniform(2, 20, (self.batch_size, 2)).astype(np.float32)
        stripes = np.sin(np.tensordot(wave, self.grid, axes=1))
        noise = rng.standard_normal(stripes.shape, dtype=np.float32)
        clean = torch.from_numpy(stripes[:, None])
        return torch.from_numpy((stripes + 0.2 * noise)[:, None]), clean


class Codebook(nn.Module):
    def __init__(self, codes, dim):
        super().__init__()
        self.codes = nn.Embedding(codes, dim)
        nn.init.uniform_(self.codes.weight, -1 / codes, 1 / codes)

    def nearest(self, z):
        table = self.codes.weight
        far = table.square().sum(1) - 2 * (z @ table.T)
        return far.argmin(dim=1)

    def forward(self, z):
        flat = z.permute(0, 2, 3, 1).reshape(-1, z.shape[1])
        with torch.no_grad():
            chosen = self.nearest(flat)
        picked = self.codes(chosen)
        loss = F.mse_loss(picked, flat.detach()) + 0.25 * F.mse_loss(flat, picked.detach())
        picked = flat + (picked - flat).detach()
        side = z.shape[-1]
        return picked.view(-1, side, side, z.shape[1]).permute(0, 3, 1, 2), loss


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x):
        return F.relu(x + self.body(x))


class AutoEncoder(nn.Module):
    def __init__(self, width=48, codes=112, dim=32):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 4, stride=2, padding=1),
            nn.ReLU(),
            Residual(width),
            nn.Conv2d(width, dim, 1),
        )
        self.codebook = Codebook(codes, dim)
        self.decoder = nn.Sequential(
            nn.Conv2d(dim, width, 1),
            Residual(width),
            nn.ConvTranspose2d(width, width, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        )

    def forward(self, x):
        quantised, codebook_loss = self.codebook(self.encoder(x))
        return self.decoder(quantised), codebook_loss


def epochs(loader):
    for epoch in itertools.count():
        for batch in loader:
            yield epoch, batch


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=int(os.environ.get("STEPS", 100_000)))
    p.add_argument("--batch-size", type=int, default=56)
    p.add_argument("--epoch", type=int, default=6, help="batches of an epoch")
    p.add_argument("--workers", type=int, default=1)
    return p.parse_args()


if __name__ == "__main__":
    args = parse()
    torch.manual_seed(1)
    loader = DataLoader(
        Tiles(args.epoch, args.batch_size),
        batch_size=None,
        shuffle=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )
    net = AutoEncoder()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for step, (epoch, (noisy, clean)) in enumerate(itertools.islice(epochs(loader), args.steps)):
        opt.zero_grad()
        out, codebook_loss = net(noisy)
        loss = F.mse_loss(out, clean) + codebook_loss
        loss.backward()
        opt.step()
        if step % 100 == 0:
            print("epoch", epoch, "step", step, "loss", f"{loss.item():.5f}")
