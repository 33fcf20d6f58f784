"""Topics of short texts: byte pairs, a small transformer with relative positions."""

import argparse
import math
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

SYLLABLES = [a + b + c for a in "bdfgklmnprst" for b in "aeiou" for c in ("", "n", "r")]
LONGEST = 128


class BytePairs:
    """Pieces of words by merging neighbours, the most common pair first."""

    def __init__(self):
        firsts = [(s[0], s[1]) for s in SYLLABLES if len(s) == 2]
        merges = [*firsts, *((s[:2], s[2]) for s in SYLLABLES if len(s) == 3)]
        self.rank = {pair: i for i, pair in enumerate(merges)}
        pieces = ["[pad]", *"abdefgiklmnoprstu", *("".join(pair) for pair in merges)]
        self.number = {piece: i for i, piece in enumerate(pieces)}

    def split(self, word):
        parts = list(word)
        while len(parts) > 1:
            pairs = list(zip(parts, parts[1:]))
            best = min(pairs, key=lambda pair: self.rank.get(pair, math.inf))
            if best not in self.rank:
                break
            merged, i = [], 0
            while i < len(parts):
                if i < len(pairs) and pairs[i] == best:
                    merged.append("".join(best))
                    i += 2
                else:
                    merged.append(parts[i])
                    i += 1
            parts = merged
        return parts

    def encode(self, text):
        ids = [self.number[piece] for word in text.lower().split() for piece in self.split(word)]
        return torch.tensor(ids[:LONGEST])


class Texts(Dataset):
    def __init__(self, count, topics, pieces, seed):
        rng = random.Random(seed)
        words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(600)]
        self.labels = [rng.randrange(topics) for _ in range(count)]
        self.texts = []
        for label in self.labels:
            favoured = words[label * 40 : label * 40 + 40]
            pool = favoured if rng.random() < 0.9 else words
            self.texts.append(" ".join(rng.choices(words, k=30) + rng.choices(pool, k=30)))
        self.pieces = pieces
        self.ids = [pieces.encode(text) for text in self.texts]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.ids[i], self.labels[i]


def collate(rows):
    ids, labels = zip(*rows)
    return pad_sequence(ids, batch_first=True), torch.tensor(labels)


def distance_buckets(length, buckets=32, furthest=128):
    """The bucket of each distance of query and key: exact when near, logarithmic when far."""
    half = buckets // 2
    exact = half // 2
    table = []
    for query in range(length):
        row = []
        for key in range(length):
            distance = abs(key - query)
            if distance >= exact:
                far = math.log(distance / exact) / math.log(furthest / exact)
                distance = min(exact + int(far * (half - exact)), half - 1)
            row.append(distance + (half if key > query else 0))
        table.append(row)
    return torch.tensor(table)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.distance = nn.Embedding(32, heads)
        self.register_buffer("buckets", distance_buckets(LONGEST))

    def forward(self, x, padding):
        size, length, dim = x.shape
        q, k, v = self.qkv(x).view(size, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        buckets = self.buckets[:length, :length]
        bias = self.distance(buckets).permute(2, 0, 1) + padding
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(mixed.transpose(1, 2).reshape(size, length, dim))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attention = Attention(dim, heads)
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim))

    def forward(self, x, padding):
        x = x + self.attention(self.norms[0](x), padding)
        return x + self.mlp(self.norms[1](x))


class TopicModel(nn.Module):
    def __init__(self, vocabulary, topics, dim=96, heads=4, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim, padding_idx=0)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.head = nn.Linear(dim, topics)

    def forward(self, ids):
        absent = ids == 0
        padding = torch.zeros(ids.shape).masked_fill(absent, -1e4)[:, None, None, :]
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, padding)
        return self.head(x.masked_fill(absent[:, :, None], 0).sum(1) / (~absent).sum(1)[:, None])


def endless(loader):
    epoch = 0
    while True:
        for batch in loader:
            yield epoch, batch
        epoch += 1


def warmup(step):
    return min(1.0, (step + 1) / 200)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--topics", type=int, default=12)
    parser.add_argument("--clip", type=float, default=1.0)
    args = parser.parse_args(argv)

    torch.manual_seed(31)
    pieces = BytePairs()
    texts = Texts(1500, args.topics, pieces, seed=31)
    loader = DataLoader(texts, args.batch_size, shuffle=True, drop_last=True, collate_fn=collate)
    model = TopicModel(len(pieces.number), args.topics)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup)
    for step, (epoch, (ids, labels)) in enumerate(endless(loader)):
        if step >= args.steps:
            break
        loss = F.cross_entropy(model(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
