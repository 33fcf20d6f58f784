"""Representations of galaxies without labels: two views of each image, pulled together (SimCLR)."""

import argparse
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

SIDE = 40
IMAGES = 4096


def draw_galaxies(count, seed):
    """Discs with spiral arms, tilted and turned, with noise of a camera (uint8 images)."""
    rng = np.random.default_rng(seed)
    axis = np.linspace(-1, 1, SIDE, dtype=np.float32)
    y, x = np.meshgrid(axis, axis, indexing="ij")
    images = np.empty((count, 3, SIDE, SIDE), dtype=np.uint8)
    for i in range(count):
        turn, tilt = rng.uniform(0, np.pi), rng.uniform(0.3, 1.0)
        u = np.cos(turn) * x + np.sin(turn) * y
        v = (np.cos(turn) * y - np.sin(turn) * x) / tilt
        radius, angle = np.hypot(u, v), np.arctan2(v, u)
        arms = 1 + rng.uniform(0, 0.8) * np.cos(rng.integers(1, 4) * 2 * angle + 9 * radius)
        light = np.exp(-radius * rng.uniform(3, 6)) * arms
        colour = rng.uniform(0.5, 1.0, (3, 1, 1))
        noisy = 200 * light * colour + rng.normal(12, 4, (3, SIDE, SIDE))
        images[i] = noisy.clip(0, 255)
    return images


class Sky:
    """All images in memory; batches in a new order each epoch."""

    def __init__(self, images, size, seed):
        self.images, self.size = torch.from_numpy(images), size
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self):
        while True:
            order = torch.randperm(len(self.images), generator=self.generator)
            for rows in order.split(self.size):
                yield self.images[rows].float() / 255


def view(images):
    """Turn, zoom and mirror each image by its own amount, and change its brightness."""
    count = len(images)
    angle = torch.rand(count) * 2 * math.pi
    zoom = 0.7 + 0.4 * torch.rand(count)
    mirror = torch.where(torch.rand(count) < 0.5, -1.0, 1.0)
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0], theta[:, 0, 1] = mirror * zoom * angle.cos(), -zoom * angle.sin()
    theta[:, 1, 0], theta[:, 1, 1] = mirror * zoom * angle.sin(), zoom * angle.cos()
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    turned = F.grid_sample(images, grid, align_corners=False)
    return turned * (0.6 + 0.8 * torch.rand(count, 1, 1, 1))


class Block(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.first = nn.Conv2d(n_in, n_out, 3, stride=2, padding=1)
        self.second = nn.Conv2d(n_out, n_out, 3, padding=1)
        self.skip = nn.Conv2d(n_in, n_out, 1, stride=2)
        self.norm = nn.GroupNorm(8, n_out)
        self.act = nn.GELU()

    def forward(self, x):
        y = self.second(self.act(self.norm(self.first(x))))
        return self.act(y + self.skip(x))


class Encoder(nn.Module):
    def __init__(self, width, dim):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=2, padding=1)
        self.blocks = nn.Sequential(
            Block(width, 2 * width), Block(2 * width, 4 * width), Block(4 * width, 4 * width)
        )
        self.project = nn.Sequential(nn.Linear(4 * width, 256), nn.ReLU(), nn.Linear(256, dim))

    def forward(self, images):
        return self.project(self.blocks(self.stem(images)).mean((2, 3)))


class NTXent(nn.Module):
    """Each view must find its partner among all others."""

    def __init__(self, temperature):
        super().__init__()
        self.temperature = temperature

    def similarity(self, z):
        z = F.normalize(z, dim=1)
        return z @ z.T

    def forward(self, one, two):
        count = len(one)
        logits = self.similarity(torch.cat([one, two])) / self.temperature
        logits = logits.masked_fill(torch.eye(2 * count, dtype=torch.bool), float("-inf"))
        partner = torch.arange(2 * count).roll(count)
        return F.cross_entropy(logits, partner)


def warm_up(step, steps=200):
    return min(1.0, (step + 1) / steps)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--dim", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.2)
    args = parser.parse_args()

    torch.manual_seed(41)
    sky = iter(Sky(draw_galaxies(IMAGES, seed=41), args.batch_size, seed=42))
    encoder, criterion = Encoder(args.width, args.dim), NTXent(args.temperature)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
    for step in range(args.steps):
        images = next(sky)
        one, two = view(images), view(images)
        loss = criterion(*encoder(torch.cat([one, two])).chunk(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 30 == 0:
            print(f"step {step}: contrast {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
