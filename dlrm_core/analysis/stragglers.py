"""What slow ranks cost: a synchronous step takes as long as its slowest rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dlrm_core.errors import InputError


@dataclass(frozen=True)
class Slowness:
    """How ranks differ, by chance.

    Attributes:
        jitter: relative standard deviation of a rank's compute from iteration to iteration
            (log-normal, of mean 1).
        spread: the same from rank to rank, for a whole run: uneven machines.
        hiccups: probability that a rank is held up in an iteration.
        hiccup: how many times as long its compute takes then.
    """

    jitter: float = 0.05
    spread: float = 0.0
    hiccups: float = 0.0
    hiccup: float = 2.0

    def __post_init__(self) -> None:
        for name, low in (("jitter", 0.0), ("spread", 0.0), ("hiccups", 0.0), ("hiccup", 1.0)):
            if getattr(self, name) < low:
                raise InputError(f"{name} is {getattr(self, name)}, expected at least {low:g}")
        if self.hiccups > 1:
            raise InputError(f"hiccups is {self.hiccups}, expected a probability up to 1")


def simulate(
    compute_ms: float,
    exchange_ms: float,
    ranks: int,
    slowness: Slowness,
    iterations: int = 400,
    seed: int = 0,
) -> pd.DataFrame:
    """Iterations of ``ranks`` ranks that all compute, then wait for each other and exchange.

    Args:
        compute_ms: of one rank that nothing slows.
        exchange_ms: exposed time of the collectives once all ranks are there.

    Returns:
        ``iteration``, ``slowest_ms`` (compute of the slowest rank), ``mean_ms`` (of all),
        ``waited_ms`` (mean time a rank waits for the slowest), ``time_ms``, ``slowest_rank``.
    """
    if ranks < 1 or iterations < 1:
        raise InputError(f"ranks is {ranks}, iterations {iterations}; expected at least 1 each")
    rng = np.random.default_rng(seed)
    times = compute_ms * _log_normal(rng, slowness.jitter, (iterations, ranks))
    times *= _log_normal(rng, slowness.spread, (ranks,))
    if slowness.hiccups > 0:
        times *= np.where(rng.random((iterations, ranks)) < slowness.hiccups, slowness.hiccup, 1.0)
    slowest = times.max(axis=1)
    return pd.DataFrame(
        {
            "iteration": np.arange(iterations),
            "slowest_ms": slowest,
            "mean_ms": times.mean(axis=1),
            "waited_ms": slowest - times.mean(axis=1),
            "time_ms": slowest + exchange_ms,
            "slowest_rank": times.argmax(axis=1),
        }
    )


def _log_normal(rng: np.random.Generator, deviation: float, shape: tuple[int, ...]) -> np.ndarray:
    """Factors of mean 1 and this relative standard deviation."""
    if deviation == 0:
        return np.ones(shape)
    sigma = np.sqrt(np.log1p(deviation**2))
    return rng.lognormal(-(sigma**2) / 2, sigma, shape)


def straggler_table(
    compute_ms: Sequence[float],
    exchange_ms: Sequence[float],
    rank_counts: Sequence[int],
    slowness: Slowness,
    iterations: int = 400,
    seed: int = 0,
) -> pd.DataFrame:
    """:func:`simulate` for several numbers of ranks, each with its own predicted times.

    Returns:
        ``ranks``, ``even_ms`` (no rank slower than another), ``mean_ms``, ``p95_ms``,
        ``waited_share`` (of the mean iteration, for the slowest rank), ``loss`` (mean over
        even, less 1).
    """
    rows = []
    for compute, exchange, ranks in zip(compute_ms, exchange_ms, rank_counts, strict=True):
        run = simulate(compute, exchange, ranks, slowness, iterations, seed)
        mean, even = float(run["time_ms"].mean()), compute + exchange
        rows.append(
            {
                "ranks": ranks,
                "even_ms": even,
                "mean_ms": mean,
                "p95_ms": float(run["time_ms"].quantile(0.95)),
                "waited_share": float(run["waited_ms"].mean()) / mean,
                "loss": mean / even - 1,
            }
        )
    return pd.DataFrame(rows)
