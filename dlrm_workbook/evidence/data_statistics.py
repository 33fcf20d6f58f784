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
from dlrm_workbook.evidence.cache import hit_curve

BATCHES = 3
"""How many of a run's first batches are looked at."""


def run_statistics(parameters: Parameters) -> dict[str, Any]:
    """:func:`batch_statistics` of the run's first batches, made beside the run.

    A generator of its own draws them from the run's seed on the CPU, so the run's
    stream is not touched. facebook's loop is read through its replay, which makes
    the same bits in a fraction of the time. A stream that the run draws on a GPU is
    another one (torch's generators differ), of the same law.
    """
    data = parameters.data
    generator = "facebook" if data.generator == "facebook_loop" else data.generator
    data = dataclasses.replace(data, generator=generator, place="cpu")
    batches = make_generator(dataclasses.replace(parameters, data=data), torch.device("cpu"))
    return batch_statistics((batches.next_batch() for _ in range(BATCHES)), parameters)


def batch_statistics(batches: Iterable[Batch], parameters: Parameters) -> dict[str, Any]:
    """Index statistics per table.

    Returns:
        ``{"batches": n, "tables": [...], "cache": [...]}`` with, for each table, ``table``,
        ``rows``, means over the batches of ``lookups_per_batch``, ``mean_bag`` (lookups of
        a sample), ``unique_rows_per_batch`` and ``hottest_share`` (share of a batch's
        lookups that fall on its most wanted row; 1 / unique rows when all are alike), and over
        all batches together ``lookups``, ``rows_used`` and ``rows_used_once``; ``cache`` as
        :func:`dlrm_workbook.evidence.cache.hit_curve`.
    """
    seen: list[list[tuple[int, int, int, int]]] = [[] for _ in parameters.model.table_rows]
    lookups: list[list[np.ndarray]] = []
    for batch in batches:
        lookups.append([batch.table_indices(t).cpu().numpy() for t in range(len(seen))])
        for figures, indices in zip(seen, lookups[-1], strict=True):
            counts = _counts(indices)
            figures.append((batch.size, indices.size, counts.size, counts.max(initial=0)))
    tables = []
    for table, (rows, figures) in enumerate(zip(parameters.model.table_rows, seen, strict=True)):
        size, total, unique, hottest = np.array(figures).T
        means = {
            "lookups_per_batch": total,
            "mean_bag": total / size,
            "unique_rows_per_batch": unique,
            "hottest_share": hottest / np.maximum(total, 1),
        }
        tables.append(
            {"table": table, "rows": rows}
            | {name: float(values.mean()) for name, values in means.items()}
            | _reuse([indices[table] for indices in lookups])
        )
    return {"batches": len(lookups), "tables": tables, "cache": hit_curve(lookups)}


def _reuse(lookups: list[np.ndarray]) -> dict[str, int]:
    counts = _counts(np.concatenate(lookups))
    once = np.count_nonzero(counts == 1)
    return {"lookups": int(counts.sum()), "rows_used": counts.size, "rows_used_once": int(once)}


def _counts(indices: np.ndarray) -> np.ndarray:
    """How often each row that occurs does so; (N,) int64 in, (U,) int64 out."""
    # by sorting: a table has far more rows than a batch has lookups
    return np.unique(indices, return_counts=True)[1]
