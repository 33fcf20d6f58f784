"""Tell beetles apart: a small ConvNeXt on made-up pictures of wing cases."""

import argparse
import logging

import torch
import torch.nn as nn
import torch.nn.functional as F

log = logging.getLogger("beetles")


def wing_cases(count, species, side, generator):
    """Ovals with stripes and spots; stripes, spots and tint depend on the species."""
    label = torch.randint(species, (count,), generator=generator)
    traits = torch.Generator().manual_seed(77)
    stripes = (2 + 8 * torch.rand(species, generator=traits))[label].view(-1, 1, 1)
    spots = (3 + 6 * torch.rand(species, generator=traits))[label].view(-1, 1, 1)
    tint = torch.rand(species, 3, generator=traits)[label].view(-1, 3, 1, 1)
    line = torch.linspace(-1, 1, side)
    y, x = torch.meshgrid(line, line, indexing="ij")
    tilt = 0.5 * torch.randn(count, 1, 1, generator=generator)
    u, v = x * tilt.cos() - y * tilt.sin(), x * tilt.sin() + y * tilt.cos()
    oval = torch.sigmoid(20 * (0.8 - (1.6 * u).square() - v.square()))
    pattern = torch.sin(stripes * u * 3) + torch.sin(spots * v * 2) * torch.cos(spots * u * 2)
    image = (oval * (0.5 + 0.25 * pattern)).unsqueeze(1) * (0.5 + tint)
    image += 0.15 * torch.randn(image.shape, generator=generator)
    return (255 * image.clamp(0, 1)).byte(), label


class Drawer:
    """Pictures in memory and the order in which they come."""

    def __init__(self, count, species, side, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.images, self.labels = wing_cases(count, species, side, self.generator)

    def __len__(self):
        return len(self.labels)

    def in_order(self, size):
        for images, labels in zip(self.images.split(size), self.labels.split(size)):
            yield self.prepare(images), labels

    def shuffled(self, size):
        while True:
            order = torch.randperm(len(self), generator=self.generator)
            for rows in order[: len(self) // size * size].split(size):
                images = self.images[rows]
                if torch.rand((), generator=self.generator) < 0.5:
                    images = images.flip(3)
                yield self.prepare(images), self.labels[rows]

    @staticmethod
    def prepare(images):
        return images.float().sub_(110).div_(60).contiguous(memory_format=torch.channels_last)


class ChannelNorm(nn.Module):
    """Layer norm over the channels of a map whose channels come last in memory."""

    def __init__(self, channels, eps=1e-6):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))
        self.shift = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x):
        return F.layer_norm(x, self.scale.shape, self.scale, self.shift, self.eps)


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norm = ChannelNorm(channels)
        self.expand = nn.Linear(channels, 4 * channels)
        self.shrink = nn.Linear(4 * channels, channels)
        self.gain = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.shrink(F.gelu(self.expand(y))) * self.gain
        return x + y.permute(0, 3, 1, 2)


class Net(nn.Module):
    def __init__(self, species, channels, depth):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 4, stride=4)
        self.body = nn.Sequential(*[Block(channels) for _ in range(depth)])
        self.norm = ChannelNorm(channels)
        self.head = nn.Linear(channels, species)

    def forward(self, images):
        maps = self.body(self.stem(images))
        return self.head(self.norm(maps.mean((2, 3))))


@torch.no_grad()
def validate(model, drawer, size):
    model.eval()
    hits = 0
    for images, labels in drawer.in_order(size):
        hits += (model(images).argmax(1) == labels).sum()
    model.train()
    return hits.item() / len(drawer)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--side", type=int, default=40)
    parser.add_argument("--species", type=int, default=24)
    parser.add_argument("--channels", type=int, default=48)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--validate-every", type=int, default=500)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    torch.manual_seed(8)
    train = Drawer(6000, args.species, args.side, seed=1)
    held_out = Drawer(640, args.species, args.side, seed=2)
    model = Net(args.species, args.channels, args.depth).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=args.steps + 1)

    for step, (images, labels) in enumerate(train.shuffled(args.batch_size), 1):
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            log.info("step %d loss %.4f", step, loss.item())
        if step % args.validate_every == 0:
            right = validate(model, held_out, args.batch_size)
            log.info("step %d right %.1f %%", step, 100 * right)
        if step == args.steps:
            break


if __name__ == "__main__":
    main()
