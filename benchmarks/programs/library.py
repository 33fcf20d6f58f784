#!/usr/bin/env python3
"""Which book does a reader borrow next?  Two towers over ids, titles and loans."""

from argparse import ArgumentParser
from time import monotonic
from zlib import crc32

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

CONSONANTS, VOWELS = list("bdfgklmnprstvwz"), list("aeiou")
GRAMS = 8192


def bags(flat, begins, ends):
    """Slices of a long array, as EmbeddingBag wants them."""
    counts = ends - begins
    offsets = np.cumsum(counts) - counts
    index = np.repeat(begins - offsets, counts) + np.arange(counts.sum())
    return torch.from_numpy(flat[index]), torch.from_numpy(offsets)


def grams(word):
    """Letter trigrams of a word, hashed."""
    word = f"#{word}#"
    return [crc32(word[i : i + 3].encode()) % GRAMS for i in range(len(word) - 2)]


class Catalogue:
    """Books with a shelf and a title of three to six words that go with the shelf."""

    def __init__(self, books, shelves, rng):
        shape = 40 * shelves, 5
        letters = np.dstack([rng.choice(CONSONANTS, shape), rng.choice(VOWELS, shape)])
        letters = letters.reshape(len(letters), -1)
        words = ["".join(row[:n]) for row, n in zip(letters, rng.integers(4, 10, 40 * shelves))]
        self.shelf = rng.integers(0, shelves, books)
        picks = self.shelf[:, None] * 40 + rng.integers(0, 40, (books, 6))
        lengths = rng.integers(3, 7, books)
        self.titles = [
            " ".join(words[k] for k in row[:n]) for row, n in zip(picks.tolist(), lengths.tolist())
        ]
        known = {word: grams(word) for word in words}
        spelt = [[g for word in title.split() for g in known[word]] for title in self.titles]
        self.grams = np.array([g for title in spelt for g in title])
        self.starts = np.cumsum([0] + [len(title) for title in spelt])

    def spell(self, books):
        """Bags of the letter trigrams of the titles."""
        return bags(self.grams, self.starts[books], self.starts[books + 1])


class Loans:
    """A long list of loans, those of one reader after another; a reader keeps to two shelves."""

    def __init__(self, catalogue, readers, each, rng):
        order = np.argsort(catalogue.shelf, kind="stable")
        first = np.searchsorted(catalogue.shelf[order], np.arange(catalogue.shelf.max() + 2))
        liked = rng.integers(0, len(first) - 1, (readers, 2))
        shelf = liked[np.arange(readers)[:, None], rng.integers(0, 2, (readers, each))]
        depth = rng.random((readers, each)) ** 3
        place = first[shelf] + (depth * (first[shelf + 1] - first[shelf])).astype(np.int64)
        self.each, self.list = each, order[place].ravel()
        counts = np.bincount(self.list, minlength=len(catalogue.shelf)) + 1.0
        self.fame = torch.from_numpy(np.log(counts / counts.sum())).float()

    def draw(self, count, rng):
        """Loans with those before them: books, bags of up to twenty earlier ones."""
        at = rng.integers(0, len(self.list), count)
        at += at % self.each == 0
        begins = np.maximum(at - at % self.each, at - 20)
        return self.list[at], bags(self.list, begins, at)


def tower(n_in, hidden, n_out):
    return nn.Sequential(
        nn.Linear(n_in, hidden),
        nn.LayerNorm(hidden),
        nn.SiLU(),
        nn.Linear(hidden, hidden // 2),
        nn.SiLU(),
        nn.Linear(hidden // 2, n_out),
    )


class TwoTowers(nn.Module):
    def __init__(self, books, dim, hidden):
        super().__init__()
        self.book = nn.Embedding(books, dim, sparse=True)
        self.past = nn.EmbeddingBag(books, dim, mode="mean", sparse=True)
        self.gram = nn.EmbeddingBag(GRAMS, dim, mode="mean")
        self.left, self.right = tower(dim, hidden, dim), tower(2 * dim, hidden, dim)
        for table in (self.book, self.past, self.gram):
            nn.init.normal_(table.weight, std=0.1)
        self.heat = nn.Parameter(torch.tensor(2.5))

    def forward(self, past, books, title):
        reader = self.left(self.past(*past))
        book = self.right(torch.cat([self.book(books), self.gram(*title)], dim=1))
        return self.heat.exp() * F.normalize(reader, dim=1) @ F.normalize(book, dim=1).T


def main():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-b", "--batch-size", type=int, default=768)
    parser.add_argument("-n", "--steps", type=int, default=20_000)
    parser.add_argument("--books", type=int, default=150_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=640)
    args = parser.parse_args()

    torch.manual_seed(3)
    rng = np.random.default_rng(3)
    catalogue = Catalogue(args.books, 60, rng)
    loans = Loans(catalogue, 20_000, 30, rng)
    model = TwoTowers(args.books, args.dim, args.hidden)
    tables = [model.book.weight, model.past.weight]
    rest = [p for p in model.parameters() if all(p is not table for table in tables)]
    optimizers = [torch.optim.SGD(tables, lr=2.0), torch.optim.AdamW(rest, lr=1e-3, fused=True)]

    began = monotonic()
    for step in range(1, args.steps + 1):
        books, past = loans.draw(args.batch_size, rng)
        title = catalogue.spell(books)
        books = torch.from_numpy(books)
        scores = model(past, books, title) - loans.fame[books]
        loss = F.cross_entropy(scores, torch.arange(len(books)))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if step % 50 == 0:
            first = (scores.argmax(1) == torch.arange(len(books))).float().mean()
            pace = step / (monotonic() - began)
            print(f"[{step}] loss {loss:.3f}  first {first:.1%}  {pace:.1f} steps/s")


if __name__ == "__main__":
    main()
