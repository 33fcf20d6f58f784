"""Click prediction from categorical and numerical columns: embeddings and an MLP."""

import argparse
import time

import numpy as np
import torch
from torch import nn

CARDINALITIES = [1000, 500, 5000, 200, 50, 2000, 300, 800]
NUM_DENSE = 16


class ClickModel(nn.Module):
    def __init__(self, cardinalities, num_dense, dim=32, hidden=512):
        super().__init__()
        self.cardinalities = cardinalities
        self.embeddings = nn.ModuleList(nn.Embedding(n, dim) for n in cardinalities)
        self.mlp = nn.Sequential(
            nn.Linear(num_dense + dim * len(cardinalities), hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def embed(self, columns):
        return [table(columns[:, i]) for i, table in enumerate(self.embeddings)]

    def forward(self, dense, columns):
        return self.mlp(torch.cat([dense, *self.embed(columns)], dim=1)).squeeze(1)


def load_data(rows, seed):
    rng = np.random.default_rng(seed)
    dense = rng.standard_normal((rows, NUM_DENSE))
    columns = np.stack([rng.integers(0, n, rows) for n in CARDINALITIES], axis=1)
    weights = rng.standard_normal(NUM_DENSE)
    clicks = (dense @ weights + rng.standard_normal(rows) > 0).astype(np.float32)
    return (
        torch.from_numpy(dense).float(),
        torch.from_numpy(columns),
        torch.from_numpy(clicks),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=1536)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    torch.manual_seed(0)
    dense, columns, clicks = load_data(60_000, seed=1)
    model = ClickModel(CARDINALITIES, NUM_DENSE)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    criterion = nn.BCEWithLogitsLoss()

    running = torch.zeros(())
    start = time.time()
    for step in range(1, args.steps + 1):
        rows = torch.randint(0, len(clicks), (args.batch_size,))
        target = clicks[rows]
        logits = model(dense[rows], columns[rows])
        loss = criterion(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.detach()
        if step % 50 == 0:
            print(f"step {step} loss {running.item() / 50:.4f} {time.time() - start:.1f}s")
            running.zero_()


if __name__ == "__main__":
    main()
