"""Contrastive pretraining on windows of a wristband's motion sensors (SimCLR on six channels)."""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

CHANNELS = 6
LENGTH = 128
TEMPERATURE = 0.2


def record(path, count=24_000):
    """Write made-up recordings, as the wristband stores them: int16, a thousandth of g."""
    rng = np.random.default_rng(17)
    time = np.arange(LENGTH) / LENGTH
    beats = rng.uniform(1, 9, (count, CHANNELS, 1))
    shift = rng.uniform(0, 2 * np.pi, (count, CHANNELS, 1))
    waves = np.sin(2 * np.pi * beats * time + shift) * rng.uniform(0.2, 1.5, (count, 1, 1))
    np.savez(path, windows=(1000 * waves).astype(np.int16), wearer=rng.integers(0, 40, count))


def conv_block(inputs, outputs, kernel, stride):
    return nn.Sequential(
        nn.Conv1d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm1d(outputs),
        nn.ReLU(),
    )


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.Sequential(
            conv_block(CHANNELS, 64, 7, 1), conv_block(64, 64, 3, 2), conv_block(64, 96, 3, 2)
        )
        self.memory = nn.GRU(96, 64, batch_first=True)

    def forward(self, x):
        _, last = self.memory(self.convs(x).transpose(1, 2))
        return last[0]


def make_projector():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))


def jitter(x):
    return x + 0.03 * torch.randn_like(x)


def rescale(x):
    return x * torch.empty(len(x), CHANNELS, 1).uniform_(0.7, 1.3)


def flip(x):
    signs = torch.randint(0, 2, (len(x), CHANNELS, 1)) * 2 - 1
    return x * signs


def augment(x):
    for change in (rescale, flip, jitter):
        x = change(x)
    return x


def nt_xent(first, second):
    """Each view must find the other one of its window among all views of the batch."""
    both = F.normalize(torch.cat([first, second]), dim=1)
    similar = both @ both.T
    similar = similar / TEMPERATURE
    similar.fill_diagonal_(float("-inf"))
    n = len(first)
    partner = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(similar, partner)


def load(path):
    with np.load(path) as archive:
        return archive["windows"]


def pretrain(path, steps, batch, momentum=0.9):
    windows = load(path)
    picks = np.random.default_rng(18)
    encoder, projector = Encoder(), make_projector()
    weights = [*encoder.parameters(), *projector.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.05, momentum=momentum, weight_decay=1e-5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20_000)

    recent = []
    for step in range(1, steps + 1):
        rows = picks.integers(0, len(windows), batch)
        x = torch.from_numpy(windows[rows]).float().div_(1000)
        views = torch.cat([augment(x), augment(x)])
        first, second = projector(encoder(views)).chunk(2)
        loss = nt_xent(first, second)

        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()

        recent.append(loss.item())
        if step % 50 == 0:
            print(f"{step} nt-xent {np.mean(recent):.3f}", flush=True)
            recent.clear()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args()
    torch.manual_seed(17)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "wristband.npz"
        record(path)
        pretrain(path, args.steps, args.batch)


if __name__ == "__main__":
    main()
