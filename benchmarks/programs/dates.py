"""From dates as people write them to ISO dates: a transformer that reads and writes characters."""

import argparse
import datetime
import math
import random

import torch
import torch.nn.functional as F
from torch import nn

FORMATS = (
    "%A, %d %B %Y",
    "%B %d, %Y (%a)",
    "the %d of %B in %Y",
    "%a %d %b %Y, week %W",
    "%A %d.%m.%Y",
    "day %j of %Y, %A",
)
PAD, START, END = 0, 1, 2
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz ,./-()"
INDEX = {character: i for i, character in enumerate(CHARACTERS, 3)}
VOCABULARY = len(CHARACTERS) + 3
LONGEST = 64


def write_date(rng):
    """A date in one of the formats, now and then with a slip of the keyboard, and in ISO."""
    day = datetime.date.fromordinal(rng.randrange(693_596, 766_645))
    text = day.strftime(rng.choice(FORMATS)).lower()
    if rng.random() < 0.1:
        at = rng.randrange(len(text) - 1)
        text = text[:at] + text[at + 1] + text[at] + text[at + 2 :]
    return text, day.isoformat()


def encode(text):
    return [INDEX[character] for character in text]


def pad(rows):
    longest = max(map(len, rows))
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def make_batch(rng, size):
    pairs = [write_date(rng) for _ in range(size)]
    source = pad([encode(text) for text, _ in pairs])
    target = pad([[START, *encode(iso), END] for _, iso in pairs])
    return source, target


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.query, self.keys = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def split(self, x):
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, memory, mask=None, causal=False):
        key, value = self.keys(memory).chunk(2, dim=2)
        mixed = F.scaled_dot_product_attention(
            self.split(self.query(x)), self.split(key), self.split(value), mask, is_causal=causal
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention to itself, to a memory if there is one, and a feed-forward net."""

    def __init__(self, dim, heads, decodes):
        super().__init__()
        self.decodes = decodes
        self.own, self.own_norm = Attention(dim, heads), nn.LayerNorm(dim)
        if decodes:
            self.cross, self.cross_norm = Attention(dim, heads), nn.LayerNorm(dim)
        self.feed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.feed_norm = nn.LayerNorm(dim)

    def forward(self, x, mask, memory=None):
        y = self.own_norm(x)
        x = x + self.own(y, y, None if self.decodes else mask, causal=self.decodes)
        if self.decodes:
            x = x + self.cross(self.cross_norm(x), memory, mask)
        return x + self.feed(self.feed_norm(x))


def waves(dim):
    place = torch.arange(LONGEST).unsqueeze(1)
    rate = torch.exp(torch.arange(0, dim, 2) * (-math.log(10_000) / dim))
    return torch.cat([torch.sin(place * rate), torch.cos(place * rate)], dim=1)


class Translator(nn.Module):
    def __init__(self, dim, heads, depth):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.register_buffer("waves", waves(dim))
        self.reader = nn.ModuleList(Layer(dim, heads, False) for _ in range(depth))
        self.writer = nn.ModuleList(Layer(dim, heads, True) for _ in range(depth))
        self.out = nn.Linear(dim, VOCABULARY)

    def embed(self, tokens):
        return self.embedding(tokens) + self.waves[: tokens.shape[1]]

    def read(self, source):
        mask = (source != PAD)[:, None, None, :]
        memory = self.embed(source)
        for layer in self.reader:
            memory = layer(memory, mask)
        return memory, mask

    def write(self, target, memory, mask):
        x = self.embed(target)
        for layer in self.writer:
            x = layer(x, mask, memory)
        return self.out(x)

    def forward(self, source, target):
        return self.write(target, *self.read(source))


@torch.no_grad()
def greedy(model, source, length=12):
    """Write dates one character at a time."""
    memory, mask = model.read(source)
    tokens = torch.full((len(source), 1), START)
    for _ in range(length - 1):
        best = model.write(tokens, memory, mask)[:, -1].argmax(1, keepdim=True)
        tokens = torch.cat([tokens, best], dim=1)
    return tokens


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--show-every", type=int, default=600)
    args = parser.parse_args()

    torch.manual_seed(53)
    rng = random.Random(53)
    model = Translator(args.dim, args.heads, args.depth)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.98))
    for step in range(1, args.steps + 1):
        source, target = make_batch(rng, args.batch_size)
        logits = model(source, target[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 30 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if step % args.show_every == 0:
            right = (greedy(model, source) == target).all(1).float().mean()
            print(f"  whole dates right: {right.item():.1%}", flush=True)


if __name__ == "__main__":
    main()
