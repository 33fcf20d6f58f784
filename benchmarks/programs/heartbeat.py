"""Classifies windows of electrocardiograms; a stem that is given, and blocks that are trained."""

import argparse
import itertools

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

LEADS, WINDOW, CLASSES = 8, 800, 6


class Recordings(Dataset):
    """Windows of long recordings, which are stored as 16-bit integers."""

    def __init__(self, recordings=320, samples=6_000, windows=150, seed=0):
        rng = np.random.default_rng(seed)
        beat = np.sin(np.arange(samples) / 30) ** 21 * 2000
        noise = rng.integers(-400, 400, (recordings, LEADS, samples), dtype=np.int16)
        self.signals = noise + beat.astype(np.int16)
        self.recording = np.repeat(np.arange(recordings), windows)
        self.start = rng.integers(0, samples - WINDOW, recordings * windows)
        self.labels = rng.integers(0, CLASSES, recordings * windows)
        self.weight = 1 / np.bincount(self.labels, minlength=CLASSES).clip(1)

    def __len__(self):
        return len(self.labels)

    def read(self, number, start):
        return self.signals[number, :, start : start + WINDOW]

    def __getitem__(self, index):
        signal = self.read(self.recording[index], self.start[index])
        return torch.from_numpy(signal.astype(np.float32) / 1000), int(self.labels[index])


def conv(inputs, outputs, size, stride=1):
    return nn.Conv1d(inputs, outputs, size, stride=stride, padding=size // 2)


class Residual(nn.Module):
    def __init__(self, channels, size=5):
        super().__init__()
        self.body = nn.Sequential(
            conv(channels, channels, size),
            nn.GroupNorm(8, channels),
            nn.ReLU(),
            conv(channels, channels, size),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


class BeatNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            conv(LEADS, 32, 15, stride=2), nn.ReLU(), conv(32, 64, 7, stride=2), nn.ReLU()
        )
        self.stem.requires_grad_(False)
        self.down = conv(64, 96, 5, stride=4)
        self.blocks = nn.Sequential(Residual(96), Residual(96))
        self.head = nn.Linear(96, CLASSES)

    def forward(self, x):
        x = self.down(self.stem(x))
        return self.head(self.blocks(x).mean(-1))


class Task:
    """What a loop needs: a model, its loss and its optimizer."""

    def __init__(self, data, lr):
        self.data = data
        self.net = BeatNet()
        weight = torch.tensor(data.weight).float()
        self.criterion = nn.CrossEntropyLoss(weight=weight)
        learned = [p for p in self.net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(learned, lr=lr, weight_decay=0.01)

    def training_step(self, batch):
        signal, label = batch
        return self.criterion(self.net(signal), label)


class Report:
    def __init__(self, every):
        self.every, self.sum = every, 0.0

    def after_step(self, number, loss):
        self.sum += loss.detach()
        if number % self.every == 0:
            print(f"[{number}] loss={self.sum.item() / self.every:.4f}", flush=True)
            self.sum = 0.0


class Loop:
    def __init__(self, task, loader, callbacks):
        self.task, self.loader, self.callbacks = task, loader, callbacks

    def batches(self):
        while True:
            yield from self.loader

    def fit(self, steps):
        for number, batch in enumerate(itertools.islice(self.batches(), steps), 1):
            loss = self.task.training_step(batch)
            self.task.optimizer.zero_grad()
            loss.backward()
            self.task.optimizer.step()
            for callback in self.callbacks:
                callback.after_step(number, loss)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-4)
    args = parser.parse_args()

    torch.manual_seed(0)
    data = Recordings()
    loader = DataLoader(
        data,
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
    )
    Loop(Task(data, args.lr), loader, [Report(every=50)]).fit(args.steps)


if __name__ == "__main__":
    main()
