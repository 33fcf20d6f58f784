"""Keyword spotting: one-second clips at 8 kHz, log-mel features, residual 1-D convolutions."""

import argparse
import math
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    rate: int = 8000
    n_fft: int = 256
    hop: int = 80
    mels: int = 40
    channels: int = 96
    blocks: int = 3
    keywords: int = 35
    clips: int = 2000
    batch: int = 64
    peak_lr: float = 0.02


def mel_bank(cfg):
    """Triangular filters, evenly spaced in mel."""
    top = 2595 * math.log10(1 + cfg.rate / 2 / 700)
    centres = 700 * (10 ** (torch.linspace(0, top, cfg.mels + 2) / 2595) - 1)
    freqs = torch.linspace(0, cfg.rate / 2, cfg.n_fft // 2 + 1)
    rising = (freqs[:, None] - centres[:-2]) / (centres[1:-1] - centres[:-2])
    falling = (centres[2:] - freqs[:, None]) / (centres[2:] - centres[1:-1])
    return torch.minimum(rising, falling).clamp(min=0)


class LogMel(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.register_buffer("window", torch.hann_window(cfg.n_fft))
        self.register_buffer("bank", mel_bank(cfg))

    def forward(self, wave):
        spec = torch.stft(
            wave, self.cfg.n_fft, self.cfg.hop, window=self.window, return_complex=True
        )
        power = torch.view_as_real(spec).square().sum(-1)
        mel = power.transpose(1, 2) @ self.bank
        return torch.log(mel + 1e-6).transpose(1, 2)


class Residual(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.conv1 = nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation, bias=False)
        self.conv2 = nn.Conv1d(width, width, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm1d(width), nn.BatchNorm1d(width)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(y)))


class Spotter(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.features = LogMel(cfg)
        self.stem = nn.Conv1d(cfg.mels, cfg.channels, 5, stride=2, padding=2)
        self.blocks = nn.Sequential(*(Residual(cfg.channels, 2**i) for i in range(cfg.blocks)))
        self.head = nn.Linear(cfg.channels, cfg.keywords)

    def forward(self, wave):
        x = self.blocks(F.relu(self.stem(self.features(wave))))
        return self.head(x.mean(dim=2))


class Clips:
    """Noisy chirps, 16 bit as they come from a recorder."""

    def __init__(self, cfg, seed=0):
        rng = np.random.default_rng(seed)
        t = np.arange(cfg.rate, dtype=np.float32) / cfg.rate
        self.labels = rng.integers(0, cfg.keywords, cfg.clips)
        pitch = (200 + 80 * self.labels[:, None]).astype(np.float32)
        wave = 0.3 * np.sin(2 * np.pi * pitch * t * (1 + 0.1 * t), dtype=np.float32)
        wave += 0.05 * rng.standard_normal(wave.shape, dtype=np.float32)
        self.samples = torch.from_numpy((wave * 32767).astype(np.int16))
        self.labels = torch.from_numpy(self.labels)
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, size):
        chosen = torch.randint(len(self.labels), (size,), generator=self.generator)
        wave = self.samples[chosen].float().div_(32767)
        gain = 0.7 + 0.6 * torch.rand(size, 1, generator=self.generator)
        return wave.mul_(gain), self.labels[chosen]


class Trainer:
    def __init__(self, cfg, steps):
        self.cfg = cfg
        self.clips = Clips(cfg)
        self.model = Spotter(cfg)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=cfg.peak_lr, momentum=0.9, nesterov=True
        )
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=cfg.peak_lr, total_steps=steps + 1
        )
        self.average = [p.detach().clone() for p in self.model.parameters()]

    def training_step(self, wave, label):
        loss = F.cross_entropy(self.model(wave), label, label_smoothing=0.05)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    @torch.no_grad()
    def update_average(self, decay=0.995):
        torch._foreach_lerp_(self.average, list(self.model.parameters()), 1 - decay)

    def fit(self, steps):
        began = time.time()
        for step in range(steps):
            wave, label = self.clips.batch(self.cfg.batch)
            loss = self.training_step(wave, label)
            self.update_average()
            if step % 100 == 0:
                print(f"[{time.time() - began:7.1f} s] step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=100_000)
    ns = ap.parse_args()
    torch.manual_seed(0)
    Trainer(Config(), ns.steps).fit(ns.steps)
