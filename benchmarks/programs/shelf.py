"""Books that go together: a denoising autoencoder over the histories of readers."""

import argparse
import math

import torch
from torch import nn


class Shelf(nn.Module):
    """Encodes the books of a reader, with some left out, and scores all books."""

    def __init__(self, num_books, width=256, inner=768, keep=0.7):
        super().__init__()
        self.num_books, self.keep = num_books, keep
        self.books = nn.EmbeddingBag(num_books, width, mode="sum")
        self.inner = nn.Sequential(
            nn.Linear(width, inner), nn.Tanh(), nn.Linear(inner, inner), nn.Tanh()
        )
        self.narrow = nn.Linear(inner, width)
        self.decode = nn.Linear(width, num_books)
        nn.init.normal_(self.books.weight, std=0.05)

    def gather(self, history):
        kept = (torch.rand(history.shape) < self.keep).float() / math.sqrt(history.shape[1])
        return self.books(history, per_sample_weights=kept)

    def forward(self, history):
        hidden = torch.tanh(self.gather(history))
        hidden = torch.tanh(self.narrow(self.inner(hidden)))
        return self.decode(hidden)


def multinomial_loss(scores, history):
    chosen = scores.gather(1, history)
    return (torch.logsumexp(scores, dim=1) - chosen.mean(1)).mean()


def readers(count, num_books, length, generator):
    """Each reader likes one of forty shelves, and takes different books from near it."""
    shelf = torch.randint(0, 40, (count, 1), generator=generator) * (num_books // 40)
    steps = torch.randint(1, 15, (count, length), generator=generator).cumsum(1)
    return (shelf + steps) % num_books


def fit(model, histories, args):
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    step = 0
    while step < args.steps:
        order = torch.randperm(len(histories))
        for rows in order.split(args.batch):
            history = histories[rows]
            loss = multinomial_loss(model(history), history)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step % args.every == 0:
                print(f"[{step}] nll={loss.item():.4f} lr={schedule.get_last_lr()[0]:.2e}")
            if step == args.steps:
                break


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--books", type=int, default=3000)
    parser.add_argument("--length", type=int, default=12)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--every", type=int, default=40)
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    torch.manual_seed(8)
    data = readers(512 * 60, options.books, options.length, torch.Generator().manual_seed(8))
    fit(Shelf(options.books), data, options)
