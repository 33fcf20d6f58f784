"""A variational autoencoder over the recipes that people have cooked (Mult-VAE)."""

import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

RECIPES = 6000
COOKS = 20_000
TASTES = 30


class Cookbook:
    """Which cook made which recipes, as rows of a sparse matrix (starts, columns)."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        fame = 1 / np.arange(1, RECIPES // TASTES + 1) ** 0.6
        fame = np.cumsum(fame / fame.sum())
        counts = rng.integers(8, 40, COOKS)
        self.starts = np.concatenate([[0], np.cumsum(counts)])
        taste = np.repeat(rng.integers(0, TASTES, COOKS), counts)
        stray = rng.random(len(taste)) < 0.25
        taste[stray] = rng.integers(0, TASTES, stray.sum())
        rank = np.minimum(np.searchsorted(fame, rng.random(len(taste))), len(fame) - 1)
        self.columns = rank * TASTES + taste

    def rows(self, cooks):
        """Ones where a cook made a recipe, and half of them doubled, as after dropout."""
        counts = self.starts[cooks + 1] - self.starts[cooks]
        first = np.repeat(self.starts[cooks] - np.cumsum(counts) + counts, counts)
        columns = self.columns[first + np.arange(len(first))]
        places = torch.from_numpy(np.repeat(np.arange(len(cooks)), counts) * RECIPES + columns)
        cooked, seen = torch.zeros(2, len(cooks), RECIPES)
        cooked.view(-1)[places] = 1.0
        seen.view(-1)[places[torch.rand(len(places)) < 0.5]] = 2.0
        return cooked, seen


class MultVAE(nn.Module):
    def __init__(self, hidden, latent):
        super().__init__()
        self.latent = latent
        self.encoder = nn.Sequential(
            nn.Linear(RECIPES, hidden), nn.Tanh(), nn.Linear(hidden, 2 * latent)
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent, hidden), nn.Tanh(), nn.Linear(hidden, RECIPES)
        )

    def forward(self, seen):
        x = F.normalize(seen, dim=1)
        mean, log_variance = self.encoder(x).split(self.latent, dim=1)
        z = mean
        if self.training:
            z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decoder(z), mean, log_variance


def negative_elbo(logits, cooked, mean, log_variance, beta):
    likelihood = (F.log_softmax(logits, dim=1) * cooked).sum(1)
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
    return (beta * divergence - likelihood).mean()


@torch.no_grad()
def ndcg(logits, held_out, k=100):
    """Normalized discounted gain of the first k."""
    best = logits.topk(k, dim=1).indices
    discount = 1 / torch.log2(torch.arange(2, k + 2))
    gain = (held_out.gather(1, best) * discount).sum(1)
    ideal = torch.cumsum(discount, 0)[held_out.sum(1).clamp(1, k).long() - 1]
    return (gain / ideal).mean().item()


class Trainer:
    def __init__(self, args):
        self.args = args
        self.book = Cookbook(seed=17)
        self.model = MultVAE(args.hidden, args.latent)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=1e-3, weight_decay=1e-6, fused=True
        )
        self.rng = np.random.default_rng(18)
        self.began = time.perf_counter()

    def beta(self, step):
        return min(0.2, 0.2 * step / self.args.anneal)

    def train_step(self, step):
        cooks = self.rng.integers(0, COOKS, self.args.batch_size)
        cooked, seen = self.book.rows(cooks)
        logits, mean, log_variance = self.model(seen)
        loss = negative_elbo(logits, cooked, mean, log_variance, self.beta(step))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach(), logits.detach(), cooked

    def run(self):
        losses = []
        for step in range(1, self.args.steps + 1):
            loss, logits, cooked = self.train_step(step)
            losses.append(loss)
            if step % self.args.log_every == 0:
                pace = 1e3 * (time.perf_counter() - self.began) / step
                mean = torch.stack(losses).mean().item()
                print(f"{step} elbo {-mean:.2f} ndcg {ndcg(logits, cooked):.3f} {pace:.0f} ms")
                losses.clear()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--batch-size", type=int, default=400)
    parser.add_argument("--hidden", type=int, default=480)
    parser.add_argument("--latent", type=int, default=96)
    parser.add_argument("--anneal", type=int, default=4000)
    parser.add_argument("--log-every", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(17)
    Trainer(args).run()


if __name__ == "__main__":
    main()
