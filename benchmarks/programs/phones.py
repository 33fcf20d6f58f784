"""Recognise phones in made-up speech with a recurrent network and CTC."""
import argparse

import numpy as np
import torch
from torch import nn

PHONES = 40
MELS = 40


class Recogniser(nn.Module):
    def __init__(self, hidden=128):
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(MELS, hidden, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv1d(hidden, hidden, 3, padding=1),
            nn.ReLU(),
        )
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, PHONES + 1)

    def forward(self, mels):
        frames = self.front(mels).transpose(1, 2)
        states, _ = self.rnn(frames)
        return self.head(states).log_softmax(-1)


class Speech:
    """Utterances of one length each batch: a sound for each phone, with noise."""

    def __init__(self, utterances, frames, phones, seed):
        rng = np.random.default_rng(seed)
        self.targets = torch.from_numpy(rng.integers(1, PHONES + 1, (utterances, phones)))
        sounds = torch.from_numpy(rng.standard_normal((PHONES + 1, MELS)).astype(np.float32))
        spread = self.targets.repeat_interleave(frames // phones, dim=1)
        noise = rng.standard_normal((utterances, MELS, spread.shape[1])).astype(np.float32)
        self.mels = sounds[spread].transpose(1, 2).contiguous() + 0.3 * torch.from_numpy(noise)

    def batch(self, size, generator):
        rows = torch.randint(len(self.mels), (size,), generator=generator)
        return self.mels[rows], self.targets[rows]


def train_step(model, criterion, optimizer, mels, targets):
    scores = model(mels)
    batch, frames, _ = scores.shape
    input_lengths = torch.full((batch,), frames)
    target_lengths = torch.full((batch,), targets.shape[1])
    loss = criterion(scores.transpose(0, 1), targets, input_lengths, target_lengths)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    return loss.detach(), scores.detach()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=24)
    args = parser.parse_args()

    torch.manual_seed(11)
    generator = torch.Generator().manual_seed(11)
    speech = Speech(1000, frames=160, phones=20, seed=11)
    model = Recogniser()
    criterion = nn.CTCLoss(blank=0, zero_infinity=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        mels, targets = speech.batch(args.batch_size, generator)
        loss, scores = train_step(model, criterion, optimizer, mels, targets)
        if step % 50 == 0:
            print(f"[{step}] ctc {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
