"""A GAN on small drawings (rings, bars and crosses of 32 x 32 pixels), hinge loss, two Adams."""

import argparse

import torch
from torch import nn

SIDE, NOISE = 32, 64


def draw(count, generator):
    """Grey drawings as bytes, as they would come from a file."""
    axis = torch.linspace(-1, 1, SIDE)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    centre = torch.rand(2, count, 1, 1, generator=generator) - 0.5
    size = torch.rand(count, 1, 1, generator=generator) * 0.4 + 0.2
    dx, dy = x - centre[0], y - centre[1]
    ring = ((dx**2 + dy**2).sqrt() - size).abs() < 0.1
    bar = (dx.abs() < 0.1) & (dy.abs() < size)
    cross = bar | ((dy.abs() < 0.1) & (dx.abs() < size))
    kind = torch.randint(3, (count, 1, 1), generator=generator)
    shape = torch.where(kind == 0, ring, torch.where(kind == 1, bar, cross))
    return (shape * 255).to(torch.uint8)[:, None]


class Generator(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.seed = nn.Linear(NOISE, 4 * width * 4 * 4)
        self.width = width
        self.grow = nn.Sequential(
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.grow(self.seed(z).view(len(z), 4 * self.width, 4, 4))


class Critic(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.look = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 4 * width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(4 * width * 4 * 4, 512),
            nn.LeakyReLU(0.2),
            nn.Linear(512, 1),
        )

    def forward(self, images):
        return self.look(images).squeeze(1)


class Gan:
    def __init__(self, lr, betas=(0.5, 0.99)):
        self.generator, self.critic = Generator(), Critic()
        self.generator_adam = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=betas)
        self.critic_adam = torch.optim.Adam(self.critic.parameters(), lr=lr, betas=betas)

    def critic_step(self, real, fake):
        on_real, on_fake = self.critic(real), self.critic(fake.detach())
        loss = (1 - on_real).relu().mean() + (1 + on_fake).relu().mean()
        self.critic_adam.zero_grad()
        loss.backward()
        self.critic_adam.step()
        return loss.detach()

    def generator_step(self, fake):
        self.critic.requires_grad_(False)
        loss = -self.critic(fake).mean()
        self.generator_adam.zero_grad()
        loss.backward()
        self.generator_adam.step()
        self.critic.requires_grad_(True)
        return loss.detach()

    def step(self, real):
        fake = self.generator(torch.randn(len(real), NOISE))
        return self.critic_step(real, fake), self.generator_step(fake)


def batches(images, size):
    while True:
        order = torch.randperm(len(images))
        for rows in order.split(size):
            if len(rows) == size:
                yield images[rows].float() / 127.5 - 1


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-4)
    args = parser.parse_args(argv)

    torch.manual_seed(5)
    images = draw(12_000, torch.Generator().manual_seed(6))
    gan = Gan(args.lr)
    stream = batches(images, args.batch_size)
    totals = torch.zeros(2)
    for step in range(1, args.steps + 1):
        totals += torch.stack(gan.step(next(stream)))
        if step % 100 == 0:
            mean_critic, mean_generator = (totals / 100).tolist()
            print(f"{step}: critic {mean_critic:.3f}, generator {mean_generator:.3f}")
            totals.zero_()


if __name__ == "__main__":
    main()
