"""What a run's own batches ask of its embedding tables: lookups, bags, repeats, hot rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from dlrm_core.config import Parameters
from dlrm_core.data.batch import Batch
from dlrm_core.data.loader import make_generator

BATCHES = 3
"""How many of a run's first batches are looked at."""


def run_statistics(parameters: Parameters) -> dict[str, Any]:
    """Index statistics of the run's first batches, made beside the run.

    A generator of its own draws them from the run's seed on the CPU, so the run's
    stream is not touched. facebook's loop is read through its replay, which makes
    the same bits in a fraction of the time. A stream that the run draws on a GPU is
    another one (torch's generators differ), of the same law.

    Returns:
        as :func:`batch_statistics`.
    """
    data = parameters.data
    generator = "facebook" if data.generator == "facebook_loop" else data.generator
    data = dataclasses.replace(data, generator=generator, place="cpu")
    batches = make_generator(dataclasses.replace(parameters, data=data), torch.device("cpu"))
    return batch_statistics((batches.next_batch() for _ in range(BATCHES)), parameters)


def batch_statistics(batches: Iterable[Batch], parameters: Parameters) -> dict[str, Any]:
    """Index statistics per table.

    Returns:
        ``{"batches": n, "tables": [...]}`` with, for each table, ``table``, ``rows``,
        and means over the batches of ``lookups_per_batch``, ``mean_bag`` (lookups of a
        sample), ``unique_rows_per_batch`` and ``hottest_share`` (share of a batch's
        lookups that fall on its most wanted row; 1 / unique rows when all are alike).
    """
    seen: list[list[tuple[int, int, int, int]]] = [[] for _ in parameters.model.table_rows]
    for batch in batches:
        for table, figures in enumerate(seen):
            figures.append((batch.size, *_count(batch.table_indices(table).cpu().numpy())))
    tables = []
    for table, (rows, figures) in enumerate(zip(parameters.model.table_rows, seen, strict=True)):
        size, lookups, unique, most = np.array(figures).T
        means = {
            "lookups_per_batch": lookups,
            "mean_bag": lookups / size,
            "unique_rows_per_batch": unique,
            "hottest_share": most / np.maximum(lookups, 1),
        }
        tables.append(
            {"table": table, "rows": rows}
            | {name: float(values.mean()) for name, values in means.items()}
        )
    return {"batches": len(seen[0]), "tables": tables}


def _count(indices: np.ndarray) -> tuple[int, int, int]:
    """Lookups, different rows, and lookups of the most wanted row; (N,) int64 in."""
    if not indices.size:
        return 0, 0, 0
    # sorted, not counted by row: a table has far more rows than a batch has lookups
    ordered = np.sort(indices)
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    runs = np.diff(starts, append=ordered.size)
    return indices.size, starts.size, int(runs.max())
