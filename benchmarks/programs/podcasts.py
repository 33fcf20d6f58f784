# Next podcast of a listener: a GRU over what was heard, trained on sampled negatives.
import argparse
import time

import numpy as np
import torch
import torch.nn as nn

N_SHOWS = 100_000
N_LISTENERS = 6_000
T = 24
EMB = 64
HID = 192
N_NEG = 64


def synth_histories(seed=3):
    """Heard shows (listeners, T + 1), some of them far more popular than others."""
    g = np.random.default_rng(seed)
    popularity = 1.0 / np.arange(1, N_SHOWS + 1) ** 0.7
    popularity /= popularity.sum()
    cdf = np.cumsum(popularity)
    draws = np.searchsorted(cdf, g.random((N_LISTENERS, T + 1)))
    return torch.from_numpy(np.minimum(draws, N_SHOWS - 1)), popularity


def batches(histories, bs, seed=4):
    g = torch.Generator().manual_seed(seed)
    while True:
        perm = torch.randperm(len(histories), generator=g)
        for lo in range(0, len(perm) - bs + 1, bs):
            chunk = histories[perm[lo : lo + bs]]
            yield chunk[:, :-1], chunk[:, 1:]


class Negatives:
    """Shows drawn by popularity, N_NEG for each listener."""

    def __init__(self, popularity, seed=7):
        self.cdf = np.cumsum(popularity)
        self.g = np.random.default_rng(seed)

    def draw(self, n):
        found = np.searchsorted(self.cdf, self.g.random((n, N_NEG)))
        return torch.from_numpy(np.minimum(found, N_SHOWS - 1))


class NextShow(nn.Module):
    def __init__(self):
        super().__init__()
        self.shows = nn.Embedding(N_SHOWS, EMB, sparse=True)
        nn.init.normal_(self.shows.weight, std=0.05)
        self.gru = nn.GRU(EMB, HID, batch_first=True)
        self.proj = nn.Linear(HID, EMB)

    def forward(self, heard):
        states, _ = self.gru(self.shows(heard))
        return self.proj(states)

    def sampled_loss(self, heard, nxt, neg):
        query = self(heard)
        hit = (query * self.shows(nxt)).sum(-1, keepdim=True)
        miss = torch.bmm(query, self.shows(neg).transpose(1, 2))
        scores = torch.cat([hit, miss], dim=-1)
        return (scores.logsumexp(-1) - scores[..., 0]).mean()


def make_optimizers(net):
    rest = [p for n, p in net.named_parameters() if not n.startswith("shows")]
    return (
        torch.optim.AdamW(rest, lr=2e-3, weight_decay=0.01),
        torch.optim.SparseAdam(list(net.shows.parameters()), lr=2e-3),
    )


def train(n_steps, bs):
    histories, popularity = synth_histories()
    negatives = Negatives(popularity)
    net = NextShow()
    opts = make_optimizers(net)
    stream = batches(histories, bs)
    t0 = time.time()
    for it in range(n_steps):
        heard, nxt = next(stream)
        neg = negatives.draw(len(heard))
        for opt in opts:
            opt.zero_grad()
        loss = net.sampled_loss(heard, nxt, neg)
        loss.backward()
        for opt in opts:
            opt.step()
        if it % 25 == 0:
            print(f"[{it:6d}] loss={loss.item():.4f} ({time.time() - t0:.1f}s)", flush=True)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20_000)
    ap.add_argument("--bs", type=int, default=160)
    opt = ap.parse_args()
    torch.manual_seed(11)
    train(opt.steps, opt.bs)
