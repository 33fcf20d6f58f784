"""A little diffusion model of pictures of 16 by 16 pixels."""

import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

STEPS = 1000


def schedule():
    betas = torch.linspace(1e-4, 0.02, STEPS)
    kept = torch.cumprod(1 - betas, dim=0)
    return kept.sqrt(), (1 - kept).sqrt()


def time_features(t, dim):
    rates = torch.exp(torch.arange(dim // 2) * (-math.log(10_000) / (dim // 2)))
    angles = t[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Block(nn.Module):
    def __init__(self, inputs, outputs, time_dim):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time_dim, outputs)

    def forward(self, x, t):
        h = F.silu(self.first(x)) + self.time(t)[:, :, None, None]
        return F.silu(self.second(h))


class UNet(nn.Module):
    def __init__(self, width=32, time_dim=64):
        super().__init__()
        self.time_dim = time_dim
        self.down = Block(3, width, time_dim)
        self.middle = Block(width, 2 * width, time_dim)
        self.up = Block(3 * width, width, time_dim)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x, t):
        t = time_features(t, self.time_dim)
        fine = self.down(x, t)
        coarse = self.middle(F.avg_pool2d(fine, 2), t)
        wide = F.interpolate(coarse, scale_factor=2, mode="nearest")
        return self.out(self.up(torch.cat([wide, fine], dim=1), t))


def diffusion_loss(model, x, t, noise, signal, spread):
    noisy = signal[t][:, None, None, None] * x + spread[t][:, None, None, None] * noise
    return F.mse_loss(model(noisy, t), noise)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-4)
    args = parser.parse_args()

    torch.manual_seed(8)
    pictures = torch.tanh(F.interpolate(torch.randn(4000, 3, 4, 4), size=16, mode="bilinear"))
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    signal, spread = schedule()
    for step in range(args.steps):
        x = pictures[torch.randint(len(pictures), (args.batch,))]
        t = torch.randint(STEPS, (args.batch,))
        noise = torch.randn_like(x)
        loss = diffusion_loss(model, x, t, noise, signal, spread)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
