"""Which birds sing in a clip: log-mel spectrograms, a small convolutional net, several labels."""

import argparse
import math
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

RATE = 16_000
CLIP = 20_000
FFT, HOP, MELS = 512, 160, 64
SPECIES = 24
TAPS = 1600


def chirp(rng, species, seconds):
    """One phrase of a species: a sweep around its own pitch with its own trill."""
    t = np.arange(int(seconds * RATE)) / RATE
    pitch = 900 + 240 * species + rng.normal(0, 30)
    trill = 8 + 3 * (species % 5)
    phase = 2 * np.pi * (pitch * t + 60 * np.sin(2 * np.pi * trill * t) / trill)
    return np.sin(phase) * np.hanning(len(t))


class Aviary:
    """Recordings in memory, each with one to three species."""

    def __init__(self, clips, seed):
        rng = np.random.default_rng(seed)
        waves = 0.05 * rng.standard_normal((clips, CLIP), dtype=np.float32)
        labels = np.zeros((clips, SPECIES), dtype=np.float32)
        for i in range(clips):
            for species in rng.choice(SPECIES, rng.integers(1, 4), replace=False):
                song = chirp(rng, species, rng.uniform(0.2, 0.6))
                start = rng.integers(0, CLIP - len(song))
                waves[i, start : start + len(song)] += rng.uniform(0.3, 1.0) * song
                labels[i, species] = 1.0
        self.waves, self.labels = torch.from_numpy(waves), torch.from_numpy(labels)

    def batches(self, size, generator):
        while True:
            order = torch.randperm(len(self.waves), generator=generator)
            for rows in order.split(size):
                if len(rows) == size:
                    yield self.waves[rows], self.labels[rows]


class Rooms:
    """Echoes of a few rooms, one drawn for each clip."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        decay = torch.exp(-torch.arange(TAPS) / torch.linspace(100, 500, count)[:, None])
        self.echoes = 0.1 * torch.randn(count, TAPS, generator=generator) * decay
        self.echoes[:, 0] = 1.0

    def __call__(self, waves):
        echo = self.echoes[torch.randint(len(self.echoes), (len(waves),))]
        size = 1 << math.ceil(math.log2(CLIP + TAPS))
        product = torch.fft.rfft(waves, size) * torch.fft.rfft(echo, size)
        return torch.fft.irfft(product, size)[:, :CLIP]


def mel_filters():
    """Triangles on the mel scale (bins, mels)."""
    mel = np.linspace(0, 2595 * np.log10(1 + RATE / 2 / 700), MELS + 2)
    edges = 700 * (10 ** (mel / 2595) - 1)
    bins = np.linspace(0, RATE / 2, FFT // 2 + 1)[:, None]
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return torch.from_numpy(np.maximum(0, np.minimum(rising, falling)).astype(np.float32))


class LogMel(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(FFT))
        self.register_buffer("filters", mel_filters())

    def forward(self, waves):
        spectrum = torch.stft(waves, FFT, HOP, window=self.window, return_complex=True)
        power = spectrum.real.square() + spectrum.imag.square()
        mel = self.filters.T @ power
        return torch.log(mel + 1e-4).unsqueeze(1)


def mask_bands(mel, widest=10):
    """SpecAugment: hide a band of pitches and a stretch of time in each clip."""
    for dim in (2, 3):
        size = mel.shape[dim]
        width = torch.randint(1, widest, (len(mel), 1))
        start = (torch.rand(len(mel), 1) * (size - width)).long()
        where = torch.arange(size)
        hidden = (where >= start) & (where < start + width)
        mel = mel.masked_fill(hidden[:, None, :, None] if dim == 2 else hidden[:, None, None], 0.0)
    return mel


def block(n_in, n_out):
    return nn.Sequential(
        nn.Conv2d(n_in, n_out, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(n_out),
        nn.ReLU(inplace=True),
    )


class SongNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.front = LogMel()
        self.stem = nn.BatchNorm2d(1)
        self.blocks = nn.Sequential(
            block(1, width), block(width, 2 * width), block(2 * width, 4 * width)
        )
        self.heads = nn.Linear(4 * width, 2 * SPECIES)

    def forward(self, waves):
        with torch.no_grad():
            mel = self.front(waves)
        mel = self.stem(mel)
        if self.training:
            mel = mask_bands(mel)
        frames = self.blocks(mel).mean(2).transpose(1, 2)
        scores, weights = self.heads(frames).chunk(2, dim=2)
        return (scores * weights.softmax(1)).sum(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=40)
    args = parser.parse_args()

    torch.manual_seed(3)
    aviary, rooms = Aviary(800, seed=3), Rooms(12, seed=4)
    model = SongNet(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    batches = aviary.batches(args.batch_size, torch.Generator().manual_seed(5))
    began = time.time()
    for step in range(1, args.steps + 1):
        waves, labels = next(batches)
        waves = rooms(waves)
        loss = F.binary_cross_entropy_with_logits(model(waves), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 30 == 0:
            pace = 1000 * (time.time() - began) / step
            print(f"{step:5d}  loss {loss.item():.4f}  {pace:.0f} ms/step", flush=True)


if __name__ == "__main__":
    main()
