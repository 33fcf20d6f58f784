"""A small residual network that tells ten kinds of drawn tiles apart."""

import argparse
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


@dataclass
class Config:
    widths: tuple = (24, 48, 96)
    classes: int = 10
    batch_size: int = 64
    peak_lr: float = 0.1
    momentum: float = 0.9
    save_every: int = 2000
    path: str = "tiles.pt"


class Residual(nn.Module):
    def __init__(self, n_in, n_out, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(n_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(n_out),
        )
        self.skip = nn.Identity()
        if stride != 1 or n_in != n_out:
            self.skip = nn.Conv2d(n_in, n_out, 1, stride, bias=False)

    def forward(self, x):
        return torch.relu(self.body(x) + self.skip(x))


class TileNet(nn.Module):
    def __init__(self, config):
        super().__init__()
        first, second, third = config.widths
        self.stem = nn.Conv2d(3, first, 3, 2, 1)
        self.stages = nn.ModuleList(
            [Residual(first, first, 1), Residual(first, second, 2), Residual(second, third, 2)]
        )
        self.head = nn.Linear(third, config.classes)

    def forward(self, images):
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


class Tiles(Dataset):
    """Stripes of ten directions and widths with noise."""

    def __init__(self, count, size, classes, seed):
        rng = np.random.default_rng(seed)
        self.kinds = rng.integers(0, classes, count)
        y, x = np.mgrid[0:size, 0:size] / size
        angle = np.linspace(0, np.pi, classes, endpoint=False)[:, None, None]
        waves = np.sin(30 * (np.cos(angle) * x + np.sin(angle) * y))
        noise = rng.standard_normal((count, 3, size, size), dtype=np.float32)
        self.images = torch.from_numpy(waves[self.kinds, None].astype(np.float32) + noise)
        self.labels = torch.from_numpy(self.kinds)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class Trainer:
    def __init__(self, config, steps):
        self.config = config
        tiles = Tiles(3000, 64, config.classes, seed=4)
        self.loader = DataLoader(tiles, config.batch_size, shuffle=True, drop_last=True)
        self.model = TileNet(config).to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.1, momentum=config.momentum, weight_decay=1e-4
        )
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=config.peak_lr, total_steps=steps + 1
        )
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
        self.steps, self.done = steps, 0

    def snapshot(self):
        state = {
            "config": asdict(self.config),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.done,
        }
        torch.save(state, self.config.path)

    def train_batch(self, images, labels):
        images = images.contiguous(memory_format=torch.channels_last)
        logits = self.model(images)
        loss = self.criterion(logits, labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach(), logits.detach()

    def run(self):
        while self.done < self.steps:
            for images, labels in self.loader:
                loss, logits = self.train_batch(images, labels)
                self.done += 1
                if self.done % 25 == 0:
                    right = (logits.argmax(1) == labels).float().mean()
                    print(f"step {self.done} loss {loss:.3f} right {right:.2f}")
                if self.done % self.config.save_every == 0:
                    self.snapshot()
                if self.done == self.steps:
                    return


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    torch.manual_seed(4)
    Trainer(Config(), options.steps).run()
