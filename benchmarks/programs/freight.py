"""Pallets per depot and day: quantiles of the next two weeks from the last twelve."""

import argparse
import logging

import numpy as np
import pandas as pd
import torch
from torch import nn

DEPOTS, DAYS = 300, 900
HISTORY, HORIZON = 84, 14
COLUMNS = ["pallets", "price", "strike", "week_sin", "week_cos", "year_sin", "year_cos"]
QUANTILES = (0.1, 0.5, 0.9)

log = logging.getLogger("freight")


def make_table(seed):
    """A long table as it comes from a warehouse: one row for each depot and day."""
    rng = np.random.default_rng(seed)
    day = np.arange(DAYS)
    level = rng.gamma(3.0, 40.0, (DEPOTS, 1))
    season = 1 + 0.3 * np.sin(2 * np.pi * (day + rng.integers(0, 365, (DEPOTS, 1))) / 365.25)
    week = rng.uniform(0.4, 1.4, (DEPOTS, 7))[:, day % 7]
    strike = rng.random((DEPOTS, DAYS)) < 0.01
    pallets = level * season * week * np.where(strike, 0.1, 1.0)
    return pd.DataFrame(
        {
            "depot": np.repeat(np.arange(DEPOTS), DAYS),
            "date": np.tile(pd.date_range("2021-01-01", periods=DAYS), DEPOTS),
            "pallets": rng.poisson(pallets).ravel(),
            "price": np.tile(1 + 0.1 * rng.standard_normal(DAYS).cumsum() / 30, DEPOTS),
            "strike": strike.ravel().astype(float),
        }
    )


def add_calendar(table):
    for name, angle in (
        ("week", table["date"].dt.dayofweek / 7),
        ("year", table["date"].dt.dayofyear / 365.25),
    ):
        table[f"{name}_sin"] = np.sin(2 * np.pi * angle)
        table[f"{name}_cos"] = np.cos(2 * np.pi * angle)
    mean = table.groupby("depot")["pallets"].transform("mean")
    table["pallets"] = table["pallets"] / mean
    return table


class Windows:
    """Random windows of random depots."""

    def __init__(self, table, size, seed):
        self.values = table[COLUMNS].to_numpy(np.float32).reshape(DEPOTS, DAYS, len(COLUMNS))
        self.size, self.rng = size, np.random.default_rng(seed)

    def __iter__(self):
        return self

    def __next__(self):
        depots = self.rng.integers(0, DEPOTS, self.size)
        starts = self.rng.integers(0, DAYS - HISTORY - HORIZON, self.size)
        days = starts[:, None] + np.arange(HISTORY + HORIZON)
        windows = torch.from_numpy(self.values[depots[:, None], days])
        return windows[:, :HISTORY], windows[:, HISTORY:, 1:], windows[:, HISTORY:, 0]


class Residual(nn.Module):
    """A gated causal convolution."""

    def __init__(self, channels, dilation):
        super().__init__()
        self.left = 2 * dilation
        self.conv = nn.Conv1d(channels, 2 * channels, 3, dilation=dilation)
        self.mix = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        signal, gate = self.conv(nn.functional.pad(x, (self.left, 0))).chunk(2, dim=1)
        return x + self.mix(torch.tanh(signal) * torch.sigmoid(gate))


class Encoder(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.lift = nn.Conv1d(len(COLUMNS), channels, 1)
        self.blocks = nn.Sequential(*(Residual(channels, 2**i) for i in range(5)))

    def forward(self, history):
        return self.blocks(self.lift(history.transpose(1, 2)))


class Forecaster(nn.Module):
    """The state of the last day and what is known of the days to come give a median and a width."""

    def __init__(self, channels):
        super().__init__()
        self.encoder = Encoder(channels)
        known = len(COLUMNS) - 1
        self.median = self._head(channels + known, 1)
        self.width = self._head(channels + known, 2)

    def _head(self, n_in, n_out):
        return nn.Sequential(nn.Linear(n_in, 128), nn.GELU(), nn.Linear(128, n_out))

    def context(self, history, known):
        state = self.encoder(history)[:, :, -1]
        return torch.cat([state.unsqueeze(1).expand(-1, HORIZON, -1), known], dim=2)

    def forward(self, history, known):
        context = self.context(history, known)
        median = self.median(context)
        below, above = nn.functional.softplus(self.width(context)).chunk(2, dim=2)
        return torch.cat([median - below, median, median + above], dim=2)


def pinball(forecast, truth, quantiles):
    error = truth.unsqueeze(2) - forecast
    return torch.maximum(quantiles * error, (quantiles - 1) * error).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--channels", type=int, default=64)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    torch.manual_seed(29)
    windows = Windows(add_calendar(make_table(29)), args.batch_size, seed=30)
    model = Forecaster(args.channels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    quantiles = torch.tensor(QUANTILES)
    for step in range(args.steps):
        history, known, truth = next(windows)
        loss = pinball(model(history, known), truth, quantiles)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 30 == 0:
            log.info("step %d pinball %.4f", step, loss.item())


if __name__ == "__main__":
    main()
