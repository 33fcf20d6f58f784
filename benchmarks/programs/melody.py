"""Causal gated convolutions that go on with a melody, trained on tunes of different lengths."""

import argparse
import math

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad

PITCHES, LENGTHS = 48, 16
VOCABULARY = PITCHES * LENGTHS + 2
PAD, END = 0, 1
SHORTEST, LONGEST = 32, 144


def compose(rng):
    """A tune: a walk on a scale, with rhythms that come back."""
    notes = rng.integers(SHORTEST, LONGEST)
    scale = np.array([0, 2, 4, 5, 7, 9, 11])[: rng.integers(5, 8)]
    walk = np.cumsum(rng.choice([-2, -1, -1, 0, 1, 1, 2], notes)) + rng.integers(8, 16)
    walk = np.abs(walk) % 24
    pitch = (walk // len(scale) * 12 + scale[walk % len(scale)]) % PITCHES
    motif = rng.integers(0, LENGTHS, rng.integers(2, 6))
    rhythm = np.resize(motif, notes)
    return np.append(2 + pitch * LENGTHS + rhythm, END)


class Songbook:
    def __init__(self, tunes, seed=5):
        rng = np.random.default_rng(seed)
        self.tunes = [compose(rng) for _ in range(tunes)]
        self.lengths = np.array([len(tune) for tune in self.tunes])
        self.rng = rng

    def batches(self, size, passes=10_000):
        """Tunes of about the same length together, batches in a random order."""
        for _ in range(passes):
            noise = self.rng.random(len(self.tunes))
            groups = np.array_split(np.lexsort((noise, self.lengths)), len(self.tunes) // size)
            for group in self.rng.permutation(len(groups)):
                yield self.collate(groups[group])

    def collate(self, rows):
        width = 1 + 16 * math.ceil(self.lengths[rows].max() / 16)
        batch = np.full((len(rows), width), PAD)
        for row, tune in zip(batch, rows):
            row[: self.lengths[tune]] = self.tunes[tune]
        return torch.from_numpy(batch)


class GatedConv(nn.Module):
    """y = x + a * sigmoid(b), where a and b see only what came before."""

    def __init__(self, channels, kernel, dilation, dropout):
        super().__init__()
        self.reach = (kernel - 1) * dilation
        self.conv = nn.Conv1d(channels, 2 * channels, kernel, dilation=dilation)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        y = nn.functional.glu(self.conv(pad(x, (self.reach, 0))), dim=1)
        return x + self.dropout(y)


class MelodyNet(nn.Module):
    def __init__(self, channels, layers, dropout):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, channels, padding_idx=PAD)
        self.layers = nn.Sequential(
            *[GatedConv(channels, 3, 2 ** (i % 4), dropout) for i in range(layers)]
        )
        self.norm = nn.LayerNorm(channels)
        self.out = nn.Linear(channels, VOCABULARY)

    def forward(self, notes):
        x = self.layers(self.embed(notes).transpose(1, 2))
        return self.out(self.norm(x.transpose(1, 2)))


def smoothed_loss(logits, target, smoothing):
    """Cross entropy with smoothed targets, over all notes that are there."""
    return cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=PAD, label_smoothing=smoothing
    )


def train(args):
    book = Songbook(args.tunes)
    model = MelodyNet(args.channels, args.layers, args.dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    total = torch.zeros(())
    for step, tunes in enumerate(book.batches(args.batch_size), start=1):
        source, target = tunes[:, :-1], tunes[:, 1:]
        logits = model(source)
        loss = smoothed_loss(logits, target, args.smoothing)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        if step % args.report == 0:
            print(f"{step:6d}  {total.item() / args.report:.4f}", flush=True)
            total.zero_()
        if step >= args.steps:
            return


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--tunes", type=int, default=4096)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--report", type=int, default=60)
    torch.manual_seed(5)
    train(parser.parse_args())
