"""A small language model over words of generated sentences."""

import argparse
import random
import time

import torch
import torch.nn.functional as F
from torch import nn

SUBJECTS = "the cat|a dog|my neighbour|the old man|her sister|every student|nobody|the crew"
VERBS = "sees|likes|paints|forgets|carries|finds|loses|repairs|praises|follows"
OBJECTS = "a red house|the river|two books|some bread|an umbrella|the clock|old songs|a map"


def corpus(sentences, seed):
    rng = random.Random(seed)
    parts = [text.split("|") for text in (SUBJECTS, VERBS, OBJECTS)]
    return " . ".join(" ".join(rng.choice(part) for part in parts) for _ in range(sentences))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        batch, length, dim = x.shape
        shape = (batch, length, self.heads, dim // self.heads)
        q, k, v = (
            part.view(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, vocabulary, dim=160, depth=4, heads=4, length=64):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def get_batch(ids, batch, length, generator):
    starts = torch.randint(0, len(ids) - length - 1, (batch,), generator=generator)
    window = starts[:, None] + torch.arange(length + 1)
    tokens = ids[window]
    return tokens[:, :-1], tokens[:, 1:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--length", type=int, default=64)
    args = parser.parse_args()

    torch.manual_seed(1337)
    generator = torch.Generator().manual_seed(1337)
    text = corpus(20_000, seed=1337)
    words = text.split()
    vocabulary = {word: i for i, word in enumerate(sorted(set(words)))}
    ids = torch.tensor([vocabulary[word] for word in words])
    model = LanguageModel(len(vocabulary), length=args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    start = time.time()
    for step in range(args.steps):
        inputs, targets = get_batch(ids, args.batch, args.length, generator)
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"iter {step}: loss {loss.item():.4f}, {time.time() - start:.1f} s")


if __name__ == "__main__":
    main()
