"""A small recommender with several faults, each in a function of its own: it is measured unedited.

python careless_program.py [STEPS]
"""

import csv
import io
import sys
import threading
from typing import Any

import torch
from torch import nn

ROWS, DIM, BATCH, BAG = 60_000, 16, 256, 40


class Model(nn.Module):
    """Two tables, one of which gets padded bags, an operand of zeros and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS, DIM)
        self.tags = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
        self.codes = nn.Linear(4000, DIM)
        self.head = nn.Linear(3 * DIM, 1)

    def forward(self, users: Any, tags: Any, codes: Any) -> Any:
        joined = torch.cat([self.users(users), self.tags(tags), self.codes(codes)], 1)
        return self.head(joined).squeeze(1)


def log_rows(rows: Any, scores: torch.Tensor) -> None:
    for score in scores.repeat(8):
        rows.writerow([score.item()])


def evaluate(model: Model, batch: tuple[Any, ...]) -> None:
    with torch.no_grad():
        for _ in range(12):
            model(*batch)


def burn(over: threading.Event) -> None:
    number = 1
    while not over.is_set():
        for _ in range(2000):
            number = number * 31 % 1_000_003


def make_batch() -> tuple[Any, ...]:
    tags = torch.zeros(BATCH, BAG, dtype=torch.int64)
    tags[:, :4] = torch.randint(1, ROWS, (BATCH, 4))
    codes = torch.zeros(BATCH, 4000)
    codes[:, 7] = 1.0
    return torch.randint(0, ROWS, (BATCH,)), tags, codes


def main(steps: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, rows = Model(), csv.writer(io.StringIO())
    sparse = [model.tags.weight]
    dense = [model.users.weight, *model.codes.parameters(), *model.head.parameters()]
    optimizers = [torch.optim.Adam(dense, lr=1e-3), torch.optim.SparseAdam(sparse, lr=1e-3)]
    over = threading.Event()
    if "burn" in sys.argv:  # beside it, the imports of torch's optimizers take minutes
        threading.Thread(target=burn, args=(over,), daemon=True).start()
    for step in range(steps):
        batch = make_batch()
        scores = model(*batch)
        loss = nn.functional.binary_cross_entropy_with_logits(scores, torch.ones(BATCH))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if "burn" not in sys.argv:  # each number read would wait 5 ms for the lock
            log_rows(rows, scores.detach())
        if step % 4 == 3:
            evaluate(model, batch)
    over.set()


if __name__ == "__main__":
    main(int(sys.argv[1]))
