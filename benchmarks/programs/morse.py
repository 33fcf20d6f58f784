# Reads Morse code from noisy audio: spectrogram -> convolutions -> GRU -> CTC.
import argparse
import math

import numpy as np
import torch
import torch.nn as nn

RATE = 2000          # samples per second
SECONDS = 4
N_FFT, HOP, BANDS = 256, 64, 40
CODE = {
    "A": ".-", "B": "-...", "C": "-.-.", "D": "-..", "E": ".", "F": "..-.", "G": "--.",
    "H": "....", "I": "..", "J": ".---", "K": "-.-", "L": ".-..", "M": "--", "N": "-.",
    "O": "---", "P": ".--.", "Q": "--.-", "R": ".-.", "S": "...", "T": "-", "U": "..-",
    "V": "...-", "W": ".--", "X": "-..-", "Y": "-.--", "Z": "--..",
}
LETTERS = sorted(CODE)


def render(text, rng):
    """One message as audio: a keyed tone of random pitch and speed."""
    unit = int(RATE * rng.uniform(0.03, 0.045))
    key = []
    for letter in text:
        for sign in CODE[letter]:
            key += [1] * (1 if sign == "." else 3) + [0]
        key += [0, 0]
    keyed = np.repeat(np.array(key, dtype=np.float32), unit)[: RATE * SECONDS]
    audio = np.zeros(RATE * SECONDS, dtype=np.float32)
    audio[: len(keyed)] = keyed
    t = np.arange(RATE * SECONDS, dtype=np.float32) / RATE
    return audio * np.sin(2 * np.pi * rng.uniform(400, 800) * t).astype(np.float32)


def make_corpus(messages, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(1, len(LETTERS) + 1, (messages, 8))
    audio = [render([LETTERS[i - 1] for i in row], rng) for row in labels]
    return torch.from_numpy(np.stack(audio)), torch.from_numpy(labels)


def filterbank():
    """Triangular bands over the bins of the spectrum."""
    bins = torch.arange(N_FFT // 2 + 1, dtype=torch.float32)
    edges = torch.linspace(4, N_FFT // 2, BANDS + 2)
    low, mid, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    return torch.minimum((bins - low) / (mid - low), (high - bins) / (high - mid)).clamp_min(0).T


class Reader(nn.Module):
    def __init__(self, channels=96, hidden=64):
        super().__init__()
        self.register_buffer("window", torch.hann_window(N_FFT))
        self.register_buffer("bank", filterbank())
        self.conv = nn.Sequential(
            nn.Conv1d(BANDS, channels, 5, padding=2), nn.BatchNorm1d(channels), nn.ReLU(),
            nn.Conv1d(channels, channels, 5, padding=2), nn.BatchNorm1d(channels), nn.ReLU(),
            nn.Conv1d(channels, channels, 5, padding=2), nn.BatchNorm1d(channels), nn.ReLU(),
        )
        self.rnn = nn.GRU(channels, hidden, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, len(LETTERS) + 1)

    def bands(self, audio):
        spectrum = torch.stft(audio, N_FFT, HOP, window=self.window, return_complex=True)
        power = spectrum.abs().square().transpose(1, 2)
        return torch.log(power @ self.bank + 1e-4)

    def encode(self, bands):
        x = self.conv(bands.transpose(1, 2)).transpose(1, 2)
        x, _ = self.rnn(x)
        return x

    def forward(self, audio):
        x = self.encode(self.bands(audio))
        return self.out(x).log_softmax(dim=2).transpose(0, 1)


def ctc(log_probs, labels):
    frames, n, _ = log_probs.shape
    return nn.functional.ctc_loss(
        log_probs, labels, torch.full((n,), frames), torch.full((n,), labels.shape[1]),
        zero_infinity=True,
    )


def add_noise(audio, level):
    return audio + level * torch.randn(audio.shape)


def greedy(log_probs):
    best = log_probs.argmax(2).T.tolist()
    texts = []
    for row in best:
        kept = [a for a, b in zip(row, [0] + row) if a and a != b]
        texts.append("".join(LETTERS[i - 1] for i in kept))
    return texts


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=100000)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--noise", type=float, default=0.3)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()

    torch.manual_seed(9)
    audio, labels = make_corpus(1500, seed=9)
    model = Reader()
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    warm_up = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: min(1.0, (i + 1) / 200))
    for it in range(args.steps):
        idx = torch.randint(0, len(audio), (args.batch_size,))
        x, y = add_noise(audio[idx], args.noise), labels[idx]
        opt.zero_grad()
        log_probs = model(x)
        loss = ctc(log_probs, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        warm_up.step()
        if it % 60 == 0:
            sample = greedy(log_probs[:, :1].detach())[0]
            per_letter = loss.item() / math.log(2)
            print(f"{it}: {per_letter:.2f} bits per letter, reads {sample!r}", flush=True)


if __name__ == "__main__":
    main()
