"""Next item of a session: a GRU over item embeddings, scored against sampled negatives."""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class SessionModel(nn.Module):
    def __init__(self, num_items, dim):
        super().__init__()
        self.items = nn.Embedding(num_items, dim, padding_idx=0)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.norm = nn.LayerNorm(dim)

    def forward(self, sessions):
        embedded = self.items(sessions)
        hidden, _ = self.gru(embedded)
        attended, _ = self.attention(hidden[:, -1:], hidden, hidden, need_weights=False)
        return self.norm(attended[:, 0] + hidden[:, -1])


def bpr_loss(users, positives, negatives):
    positive_scores = (users * positives).sum(1, keepdim=True)
    negative_scores = torch.einsum("bd,nd->bn", users, negatives)
    return -F.logsigmoid(positive_scores - negative_scores).mean()


def next_batch(sessions, rng, size):
    rows = rng.integers(0, len(sessions), size)
    chosen = sessions[rows]
    return torch.from_numpy(chosen[:, :-1]), torch.from_numpy(chosen[:, -1])


def train(args):
    torch.manual_seed(11)
    rng = np.random.default_rng(11)
    sessions = rng.integers(1, args.items, (20_000, args.length + 1))
    model = SessionModel(args.items, args.dim)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        inputs, targets = next_batch(sessions, rng, args.batch)
        negatives = torch.from_numpy(rng.integers(1, args.items, args.negatives))
        users = model(inputs)
        loss = bpr_loss(users, model.items(targets), model.items(negatives))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"[{step}] bpr {loss.item():.4f}")


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--items", type=int, default=8000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--length", type=int, default=20)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--negatives", type=int, default=256)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse())
