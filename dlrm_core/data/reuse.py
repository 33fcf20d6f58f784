"""How often production tables use a row again, as a law from which rows are drawn.

Source: ``embedding_bag/2022/locality_stats.txt`` of facebookresearch/dlrm_datasets (MIT), which
counts how often each row comes up in one batch of 131,072 samples over 788 tables that are made
to be used as Meta's production tables are: 1,405,163,864 lookups of 110,259,238 different rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

WINDOW = 1_783_203
"""Lookups of the source's mean table in its batch."""

CLASSES = np.loadtxt(Path(__file__).with_name("reuse_classes.csv"), delimiter=",", skiprows=1)
"""Rows of a class and the lookups that a window spends on them, hottest rows first.

Rows of one class are equally likely, so each comes up a Poisson number of times. The numbers
are the non-negative least-squares fit of such classes to the source's two histograms, over rows
and over lookups; the fit leaves at most 0.0004 in any bin.
"""

TAIL = 18_250
"""Lookups of a window that fall on all other rows of the table."""

FULL_ROWS = 300_000
"""Rows from which a table has room for all classes and a tail of rows that rarely come twice.

A smaller table is a smaller copy: as many lookups per row, thus a window of rows / FULL_ROWS of
:data:`WINDOW`.
"""


class ReuseLaw:
    """Chances of a table's rows, row 0 among the hottest.

    Draws are independent of each other: the source does not say in which order rows come.

    Args:
        rows: R, rows of the table.

    Attributes:
        begins: first row of each class and of the tail, (17,) int64.
        sizes: rows of each, (17,) int64; in a small table the hottest classes share rows.
        shares: share of the lookups that each has, (17,) float64.
    """

    def __init__(self, rows: int) -> None:
        counts, lookups = CLASSES.T
        ends = np.floor(min(1.0, rows / FULL_ROWS) * counts.cumsum()).astype(np.int64)
        self.begins = np.minimum(np.append(0, ends), rows - 1)
        self.sizes = np.maximum(np.append(ends, rows) - self.begins, 1)
        lookups = np.append(lookups, TAIL)
        self.shares = lookups / lookups.sum()
        self._tables: list[torch.Tensor] = []

    def rows(self, draws: torch.Tensor) -> torch.Tensor:
        """Rows (N,) int64 from draws in [0, 1), (N,) float64; all on one device."""
        import torch  # what reads the shares alone does without

        if not self._tables:
            edges = np.append(0.0, self.shares.cumsum()[:-1])
            # one gather a draw from each: where its class begins, and how many rows a unit spans
            tables = (edges[1:], edges, self.sizes / self.shares, self.begins, self.sizes - 1)
            self._tables = [torch.from_numpy(table).to(draws.device) for table in tables]
        bounds, starts, spans, begins, lasts = self._tables
        kind = torch.searchsorted(bounds, draws, right=True)
        within = ((draws - starts[kind]) * spans[kind]).long()
        return begins[kind] + within.minimum(lasts[kind])

    def unique(self, lookups: float) -> float:
        """Expected different rows among so many lookups."""
        chances = np.minimum(self.shares / self.sizes, 1 - 1e-12)
        seen = -self.sizes * np.expm1(lookups * np.log1p(-chances))
        return float(min(seen.sum(), self.begins[-1] + self.sizes[-1]))

    def hottest(self) -> float:
        """Share of the lookups that fall on row 0."""
        return float((self.shares / self.sizes)[self.begins == 0].sum())
