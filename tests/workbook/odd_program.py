"""A training that mostly computes what it does not need: ``FILE STEPS [MODE] [N]``.

Each of four lines computes without need; with ``loader`` the batches are made slowly, by a
DataLoader with N workers; with ``parts`` each batch is passed in parts, row by row, twice; with
``tables`` the model is :class:`Tables`.
"""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

SIZE, FEATURES, SLOWNESS = 512, 96, 4
GUIDE = torch.rand(64, 8192)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(1, 4) for _ in range(FEATURES))
        self.top = nn.Sequential(nn.Linear(4 * FEATURES, 256), nn.ReLU(), nn.Linear(256, 64))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        columns = values.split(1, dim=1)
        small = [torch.relu(layer(x)) for layer, x in zip(self.each, columns, strict=True)]
        return self.top(torch.cat(small, dim=1))


class Tables(nn.Module):
    """Scales all rows of a table, judges twice, learns with what nobody trains or weighs 0, and
    reads notes that are mostly padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(60_000, 64, sparse=True)
        self.judge = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64))
        self.frozen = nn.Sequential(nn.Linear(FEATURES, 3072), nn.ReLU(), nn.Linear(3072, 64))
        self.unheard = nn.Linear(FEATURES, 64)
        self.notes, self.read = nn.Embedding(50, 64, padding_idx=0), nn.Linear(64, 256)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        rows = (values[:, 0] * 5e3).long()
        found = nn.functional.embedding(rows, self.table.weight.tanh()) + self.table(rows)
        opinions = [self.judge(found) for _ in range(4)]
        judged = torch.stack(opinions).mean(dim=0) + self.frozen(values)
        heard = self.read(self.notes((40 * values[:, :32] - 30).clamp(min=0).long()))
        return judged + 0.0 * self.unheard(values) + heard.mean(dim=(1, 2))[:, None]


def contrast(vectors: torch.Tensor, popularity: np.ndarray) -> torch.Tensor:
    scores = vectors @ vectors.T - torch.from_numpy(popularity)
    both = torch.log_softmax(scores, dim=1) + torch.log_softmax(scores, dim=0)
    return both.diagonal().mean().neg()


def scale(loss: torch.Tensor, model: nn.Module) -> float:
    loss.backward(retain_graph=True)
    return sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)


def watch(module: nn.Module, _inputs: object, vectors: torch.Tensor) -> None:
    module.spread = (vectors.detach() @ GUIDE).std()


def collate(rows: list[int]) -> torch.Tensor:
    # several times a step's own time, so that the step waits also on a machine that others use
    for _ in range(SLOWNESS):
        made = []
        for row in rows:
            made.append([sum(divmod(row * 31 + column, 97)) / 97 for column in range(FEATURES)])
    return torch.tensor(made)


def pass_parts(model: nn.Module, batch: torch.Tensor) -> None:
    for part in batch.split(SIZE // 4):
        vectors = checkpoint(model, part, use_reentrant=False).repeat(1, 16)
        rows = []
        for row in range(len(part)):
            rows.append(vectors[row])
        torch.stack(rows).square().mean().backward()


def main() -> None:
    loads = "loader" in sys.argv
    torch.set_num_threads(1)
    model = Tables() if "tables" in sys.argv else Towers()
    if len(sys.argv) < 3:
        model.top.register_forward_hook(watch)
    trained = [one for name, one in model.named_parameters() if "frozen" not in name]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    popularity = np.log(np.arange(1.0, SIZE + 1))
    rows = list(range(400 * SIZE))
    workers = int(sys.argv[-1]) if loads else 0
    loader = DataLoader(rows, batch_size=SIZE, collate_fn=collate, num_workers=workers)
    values = torch.rand(SIZE, FEATURES)
    for batch in loader if loads else iter(lambda: values, None):
        if "parts" in sys.argv:
            pass_parts(model, batch)
            optimizer.step()
            continue
        vectors = model(batch)
        if loads or "tables" in sys.argv:
            loss = vectors.square().mean()
        else:
            loss = contrast(vectors, popularity)
            scale(loss, model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
