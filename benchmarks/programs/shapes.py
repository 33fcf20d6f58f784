"""Classifies drawn shapes with a small convolutional network."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


def conv_block(n_in, n_out):
    return nn.Sequential(
        nn.Conv2d(n_in, n_out, 3, padding=1), nn.BatchNorm2d(n_out), nn.ReLU(), nn.MaxPool2d(2)
    )


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(conv_block(1, 24), conv_block(24, 48), conv_block(48, 96))

    def forward(self, images):
        return self.blocks(images).mean((2, 3))


class Head(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(96, 256), nn.ReLU(), nn.Linear(256, classes))

    def forward(self, features):
        return self.layers(features)


def draw(count, size, generator):
    """Discs, rings and squares with noise, and which of the three each is."""
    kind = torch.randint(0, 3, (count,), generator=generator)
    axis = torch.arange(size) - size / 2
    distance = (axis[:, None] ** 2 + axis[None, :] ** 2).sqrt()
    square = (axis.abs()[:, None] < 8) & (axis.abs()[None, :] < 8)
    masks = torch.stack([distance < 9, (distance < 10) & (distance > 6), square]).float()
    noise = torch.randn(count, size, size, generator=generator) * 0.4
    return (masks[kind] + noise)[:, None], kind


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()

    torch.manual_seed(9)
    images, kinds = draw(4096, 32, torch.Generator().manual_seed(9))
    trunk, head = Trunk(), Head(3)
    optimizer = torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.05, momentum=0.9)
    for step in range(args.steps):
        rows = torch.arange(args.batch_size) + step * args.batch_size
        rows = rows % len(images)
        logits = head(trunk(images[rows]))
        loss = F.cross_entropy(logits, kinds[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            accuracy = (logits.argmax(1) == kinds[rows]).float().mean()
            print(f"{step:5d} loss {loss.item():.3f} accuracy {accuracy.item():.2f}")


if __name__ == "__main__":
    main()
