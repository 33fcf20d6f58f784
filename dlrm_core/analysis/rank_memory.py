"""Memory of every rank: weights, optimiser state, gradients, activations, what is exchanged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from dlrm_core.analysis.communication import FLOAT_BYTES, INDEX_BYTES, dense_parameters
from dlrm_core.analysis.sharding import Plan
from dlrm_core.capacity_step import dense_peak
from dlrm_core.config import Parameters

STATE_NUMBERS = {"sgd": (0.0, 0), "adagrad": (1.0, 1), "adam": (2.0, 2)}
"""Optimiser to the numbers it keeps for each of a table's and of the dense part's weights;
``rowwise_adagrad`` keeps one a row."""


def rank_memory(parameters: Parameters, plan: Plan, batch_size: int) -> pd.DataFrame:
    """Bytes on each rank while an iteration of ``batch_size`` samples over all ranks runs.

    With B samples, R ranks, P dense weights: dense part 4 P of weights, 4 P of gradients and
    the optimiser's state; activations of B/R samples (:mod:`dlrm_core.capacity_step`); pooled
    vectors and their gradients, those a rank makes (4 B times its columns) and those it
    receives (4 B/R T d), each twice; indices of its own samples and of its own tables, 8 bytes
    each; with replicated tables a dense gradient of their size. What allocators and libraries
    take is not in it.

    Returns:
        A row a rank: ``rank``, ``table_bytes``, ``dense_bytes``, ``state_bytes``,
        ``gradient_bytes``, ``activation_bytes``, ``exchange_bytes``, ``total_bytes``.
    """
    ranks, dim = plan.ranks, plan.dim
    tables = plan.table_bytes(FLOAT_BYTES)
    dense = FLOAT_BYTES * dense_parameters(parameters)
    own = -(-batch_size // ranks)
    local = replace(parameters, training=replace(parameters.training, batch_size=own))
    peak = dense_peak(local, gpu=True)
    made = plan.columns_sent() + dim * len(plan.of_kind("row_wise"))
    received = own * dim * len(plan.tables)
    looked_up = sum(plan.lookups)
    share = _lookups_of_ranks(plan)
    indices = INDEX_BYTES * (own * (looked_up + len(plan.tables)) + batch_size * share)
    copies = FLOAT_BYTES * dim * sum(table.rows for table in plan.of_kind("replicated"))
    frame = pd.DataFrame(
        {
            "rank": np.arange(ranks),
            "table_bytes": tables,
            "dense_bytes": dense,
            "state_bytes": _state(parameters, plan, tables, dense),
            "gradient_bytes": dense + copies,
            "activation_bytes": peak.activations + peak.gradients,
            "exchange_bytes": 2 * FLOAT_BYTES * (batch_size * made + received) + indices,
        }
    ).astype(np.int64)
    frame["total_bytes"] = frame.drop(columns="rank").sum(axis=1)
    return frame


def _state(parameters: Parameters, plan: Plan, tables: np.ndarray, dense: int) -> np.ndarray:
    optimizer = parameters.training.optimizer
    if optimizer == "rowwise_adagrad":
        # a number a row; a column slice has as many rows as its table
        rows = np.zeros(plan.ranks)
        for table in plan.tables:
            if table.kind == "replicated":
                rows += table.rows
            else:
                np.add.at(rows, np.asarray(table.ranks), table.shard_rows)
        return FLOAT_BYTES * rows + dense
    of_tables, of_dense = STATE_NUMBERS[optimizer]
    return of_tables * tables + of_dense * dense


def _lookups_of_ranks(plan: Plan) -> np.ndarray:
    """Indices and lengths that each rank gets for one sample of the global batch."""
    total = np.zeros(plan.ranks)
    for table in plan.of_kind("table_wise", "column_wise", "row_wise"):
        count = plan.lookups[table.table]
        each = (
            count * table.shard_rows / table.rows + 1
            if table.kind == "row_wise"
            else np.full(table.shards, count + 1)
        )
        np.add.at(total, np.asarray(table.ranks), each)
    return total
