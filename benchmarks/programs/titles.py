"""Sorts product titles into categories with a bidirectional GRU."""

import argparse
import itertools
import random

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

CATEGORIES = 200
SYLLABLES = [consonant + vowel for consonant in "bdkmt" for vowel in "aeiou"]
WORDS = ["".join(parts) for parts in itertools.product(SYLLABLES, repeat=3)][:3000]


def make_titles(count, seed):
    """Titles of 8 to 26 words; a third of the words hint at the category."""
    rng = random.Random(seed)
    titles, categories = [], []
    for _ in range(count):
        category = rng.randrange(CATEGORIES)
        hints = WORDS[category * 15 : category * 15 + 15]
        words = [
            rng.choice(hints) if rng.random() < 0.33 else rng.choice(WORDS)
            for _ in range(rng.randint(8, 26))
        ]
        titles.append(" ".join(words))
        categories.append(category)
    return titles, categories


class Titles(Dataset):
    def __init__(self, titles, categories):
        vocab = {word: i for i, word in enumerate(WORDS, start=1)}
        self.ids = [torch.tensor([vocab[word] for word in title.split()]) for title in titles]
        self.categories = categories

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i], self.categories[i]


class ByLength(Sampler):
    """Endless batches of titles of similar length, in random order."""

    def __init__(self, lengths, batch_size, seed):
        self.lengths, self.batch_size = torch.as_tensor(lengths), batch_size
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self):
        while True:
            jitter = torch.rand(len(self.lengths), generator=self.generator)
            batches = torch.argsort(self.lengths + 2 * jitter).split(self.batch_size)
            for i in torch.randperm(len(batches) - 1, generator=self.generator).tolist():
                yield batches[i].tolist()


def collate(samples):
    ids, categories = zip(*samples, strict=True)
    lengths = torch.tensor([len(row) for row in ids])
    return pad_sequence(ids, batch_first=True), lengths, torch.tensor(categories)


class Classifier(nn.Module):
    def __init__(self, vocab_size, dim=96, hidden=160):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim, padding_idx=0)
        self.gru = nn.GRU(dim, hidden, batch_first=True, bidirectional=True)
        self.classify = nn.Sequential(
            nn.Dropout(0.1), nn.Linear(2 * hidden, 256), nn.ReLU(), nn.Linear(256, CATEGORIES)
        )

    def forward(self, ids, lengths):
        vectors = self.embed(ids)
        packed = pack_padded_sequence(vectors, lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(
            self.gru(packed)[0], batch_first=True, padding_value=float("-inf")
        )
        return self.classify(states.max(dim=1).values)


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--steps", type=int, default=100_000)
    p.add_argument("--batch-size", type=int, default=128)
    p.add_argument("--workers", type=int, default=1)
    p.add_argument("--clip", type=float, default=1.0)
    opt = p.parse_args()

    torch.manual_seed(5)
    titles, categories = make_titles(20_000, seed=5)
    dataset = Titles(titles, categories)
    sampler = ByLength([len(title.split()) for title in titles], opt.batch_size, seed=6)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, num_workers=opt.workers)
    model = Classifier(len(WORDS) + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    loss_fn = nn.CrossEntropyLoss()
    total, correct = 0, torch.zeros((), dtype=torch.long)
    batches = iter(loader)
    for step in range(1, opt.steps + 1):
        ids, lengths, target = next(batches)
        logits = model(ids, lengths)
        loss = loss_fn(logits, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), opt.clip)
        optimizer.step()
        correct += (logits.detach().argmax(dim=1) == target).sum()
        total += len(target)
        if step % 100 == 0:
            print(f"{step}: loss {loss.item():.3f}, accuracy {correct.item() / total:.3f}")
            total, correct = 0, torch.zeros((), dtype=torch.long)


if __name__ == "__main__":
    main()
