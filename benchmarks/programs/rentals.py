"""Three predictions for holiday flats shown to guests: click, length of stay, class of price."""

import argparse
import logging
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

log = logging.getLogger("rentals")

SIZES = {
    "guest": 4_000,
    "flat": 5_000,
    "host": 2_000,
    "street": 3_000,
    "town": 400,
    "agent": 1_500,
    "month": 12,
}
MEASURES = [f"m{i:02d}" for i in range(20)]
AMENITIES = 150


@dataclass
class Config:
    rows: int = 150_000
    batch: int = 1152
    width: int = 576
    dim: int = 16
    lr: float = 5e-4
    workers: int = 2


def make_frame(rows: int) -> pd.DataFrame:
    rng = np.random.default_rng(5)
    frame = pd.DataFrame(rng.standard_normal((rows, len(MEASURES)), dtype=np.float32))
    frame.columns = MEASURES
    for name, size in SIZES.items():
        frame[name] = rng.integers(0, size, rows)
    score = frame["m00"] - frame["m01"] + rng.standard_normal(rows)
    frame["clicked"] = (score > 0.5).astype(np.float32)
    frame["nights"] = np.log1p(rng.poisson(4, rows)).astype(np.float32)
    frame["price"] = rng.integers(0, 6, rows)
    return frame


class Impressions(Dataset):
    """Rows of the frame, held as arrays; whole batches are taken at once."""

    def __init__(self, frame: pd.DataFrame):
        self.measures = np.ascontiguousarray(frame[MEASURES].to_numpy(np.float32))
        self.ids = np.ascontiguousarray(frame[list(SIZES)].to_numpy(np.int64))
        self.targets = {name: frame[name].to_numpy() for name in ("clicked", "nights", "price")}
        self.amenities = np.random.default_rng(6).integers(0, AMENITIES, (len(frame), 6))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitems__(self, rows: list[int]) -> dict[str, Tensor]:
        taken = {name: column[rows] for name, column in self.targets.items()}
        taken["measures"] = self.measures[rows]
        taken["ids"] = self.ids[rows]
        taken["amenities"] = self.amenities[rows]
        return {name: torch.from_numpy(array) for name, array in taken.items()}


def as_is(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch


def make_loader(frame: pd.DataFrame, cfg: Config) -> DataLoader:
    data = Impressions(frame)
    batches = BatchSampler(RandomSampler(data), cfg.batch, drop_last=True)
    return DataLoader(
        data,
        batch_sampler=batches,
        collate_fn=as_is,
        num_workers=cfg.workers,
        persistent_workers=cfg.workers > 0,
    )


class Flats(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, cfg.dim) for n in SIZES.values())
        self.bag = nn.EmbeddingBag(AMENITIES, cfg.dim, mode="mean")
        inputs = len(MEASURES) + cfg.dim * (len(SIZES) + 1)
        self.trunk = nn.Sequential(
            nn.Linear(inputs, cfg.width),
            nn.ReLU(),
            nn.Linear(cfg.width, cfg.width),
            nn.ReLU(),
        )
        self.click = self.head(cfg.width, 1)
        self.nights = self.head(cfg.width, 1)
        self.price = self.head(cfg.width, 6)

    @staticmethod
    def head(width: int, out: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, out))

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        ids = batch["ids"]
        parts = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        parts.append(self.bag(batch["amenities"]))
        shared = self.trunk(torch.cat([batch["measures"], *parts], dim=1))
        return self.click(shared)[:, 0], self.nights(shared)[:, 0], self.price(shared)


class Trainer:
    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.loader = make_loader(make_frame(cfg.rows), cfg)
        self.model = Flats(cfg)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=cfg.lr)

    def losses(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        click, nights, price = self.model(batch)
        return {
            "click": F.binary_cross_entropy_with_logits(click, batch["clicked"]),
            "nights": F.smooth_l1_loss(nights, batch["nights"]),
            "price": F.cross_entropy(price, batch["price"]),
        }

    def train_step(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        losses = self.losses(batch)
        total = losses["click"] + 0.5 * losses["nights"] + 0.2 * losses["price"]
        self.optimizer.zero_grad()
        total.backward()
        self.optimizer.step()
        return losses

    def fit(self, steps: int) -> None:
        done = 0
        while done < steps:
            for batch in self.loader:
                losses = self.train_step(batch)
                done += 1
                if done % 40 == 0:
                    log.info("%d %s", done, {k: round(v.item(), 3) for k, v in losses.items()})
                if done == steps:
                    return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(5)
    Trainer(Config(workers=args.workers)).fit(args.steps)


if __name__ == "__main__":
    main()
