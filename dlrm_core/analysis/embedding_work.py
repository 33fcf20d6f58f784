"""Lookups, gradients and updates of embedding tables: bytes by back end and optimiser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrm_core.analysis.work_rows import FLOAT_BYTES, INDEX_BYTES, Ledger
from dlrm_core.config import Parameters


@dataclass(frozen=True)
class Lookups:
    """What one batch asks of one table, on average."""

    table: int
    rows: int
    count: float
    """Indices a batch."""
    unique: float
    """Different rows a batch."""

    @property
    def scattered(self) -> float:
        """Lookups whose row lies anywhere in the table.

        All of them by a uniform law. By a skewed one, rows repeat more often than they
        would by chance; those repeats find their row in the cache.
        """
        by_chance = _unique_of_uniform(self.rows, self.count)
        return self.count * min(1.0, self.unique / by_chance) if by_chance > 0 else 0.0


def lookups(parameters: Parameters, statistics: Mapping[str, Any] | None = None) -> list[Lookups]:
    """Indices and different rows a batch, table by table.

    Args:
        statistics: ``meta["data_statistics"]``; where it lists a table, its measured
            ``lookups_per_batch`` and ``unique_rows_per_batch`` count, else the law of the
            generator.
    """
    measured = {int(row["table"]): row for row in (statistics or {}).get("tables") or []}
    result = []
    for table, rows in enumerate(parameters.model.table_rows):
        known = measured.get(table) or {}
        if known.get("rows") not in (None, rows):
            known = {}
        count = known.get("lookups_per_batch")
        if count is None:
            count = parameters.training.batch_size * mean_lookups(parameters, rows)
        unique = known.get("unique_rows_per_batch")
        if unique is None:
            unique = expected_unique(parameters, rows, count)
        result.append(Lookups(table, rows, float(count), float(unique)))
    return result


def mean_lookups(parameters: Parameters, rows: int) -> float:
    """Mean indices of a bag in a table of ``rows`` rows, as the generator leaves it.

    A bag holds c = k draws, or max(1, round(r min(R, k))), r ~ U[0,1). facebook's law
    draws round(u (R − 1)) and removes duplicates: its two end rows have half the chance
    of the others, so E[different of c] = (R − 2)(1 − (1 − p)^c) + 2 (1 − (1 − p/2)^c),
    p = 1 / (R − 1).
    """
    sizes, chances = _bag_law(parameters, rows)
    if parameters.data.generator.startswith("facebook"):
        sizes = _different(sizes, rows)
    return float((sizes * chances).sum())


def _bag_law(parameters: Parameters, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws of a bag and how likely each number of them is."""
    data = parameters.data
    if data.fixed_pooling:
        return np.array([float(data.indices_per_lookup)]), np.ones(1)
    bound = min(rows, data.indices_per_lookup)
    if bound == 1:
        return np.ones(1), np.ones(1)
    sizes = np.arange(1.0, bound + 1)
    chances = np.full(bound, 1.0 / bound)
    # max(1, round(r k)): what rounds to 0 becomes 1; only half a unit rounds to k
    chances[0], chances[-1] = 1.5 / bound, 0.5 / bound
    if bound == 2:
        chances[:] = 0.75, 0.25
    return sizes, chances


def _different(draws: np.ndarray, rows: int) -> np.ndarray:
    """Expected different rows of so many draws by facebook's law."""
    if rows == 1:
        return np.ones_like(draws)
    chance = 1.0 / (rows - 1)
    ends = 2.0 * (1.0 - (1.0 - chance / 2) ** draws)
    return (rows - 2) * (1.0 - (1.0 - chance) ** draws) + ends


def expected_unique(parameters: Parameters, rows: int, count: float) -> float:
    """Expected different rows among ``count`` lookups, R (1 − (1 − 1/R)^N) for uniform ones.

    With zipf: the sum over rows of 1 − (1 − p_i)^N, p_i = ((i+1)^(1−a) − (i+2)^(1−a)) / (1 −
    (R+1)^(1−a)).
    """
    if parameters.data.generator not in ("zipf", "teacher"):
        return _unique_of_uniform(rows, count)
    chances = _zipf_chances(rows, parameters.data.zipf_exponent)
    return float(-np.expm1(count * np.log1p(-np.minimum(chances, 1 - 1e-12))).sum())


def _unique_of_uniform(rows: int, count: float) -> float:
    return float(-rows * np.expm1(count * np.log1p(-1.0 / rows))) if rows > 1 else min(1.0, count)


def _zipf_chances(rows: int, exponent: float) -> np.ndarray:
    edges = np.arange(1.0, rows + 2)
    law = np.log(edges) if exponent == 1.0 else edges ** (1.0 - exponent)
    return np.diff(law) / (law[-1] - law[0])


def embedding_rows(ledger: Ledger, parameters: Parameters, looked_up: Sequence[Lookups]) -> None:
    """Forward, backward and update of all tables, by the back end that runs them."""
    fused = parameters.training.embedding_backend != "torch"
    naive = fused and parameters.training.embedding_update == "naive"
    optimizer = parameters.training.optimizer
    size, dim = parameters.training.batch_size, parameters.model.embedding_dim
    with ledger.part("embedding", "forward"):
        for table in looked_up:
            _forward(ledger, table, size, dim, fused)
    if fused and not naive:
        # the tables change while backward runs; nothing is left for the update
        with ledger.part("embedding", "backward"):
            for table in looked_up:
                _fused_update(ledger, table, size, dim, optimizer)
        return
    with ledger.part("embedding", "backward"):
        for table in looked_up:
            _sparse_gradient(ledger, table, size, dim)
    with ledger.part("embedding", "update"):
        for table in looked_up:
            _sparse_update(ledger, table, dim, optimizer)


def _forward(ledger: Ledger, table: Lookups, size: int, dim: int, fused: bool) -> None:
    """A row a lookup, an index each, an offset a bag; one pooled vector a bag."""
    rows = table.count * dim * FLOAT_BYTES
    ledger.add(
        "fused_lookup" if fused else "_embedding_bag",
        rows + (table.count + size) * INDEX_BYTES,
        size * dim * FLOAT_BYTES,
        flops=table.count * dim,
        gather=table.scattered * dim * FLOAT_BYTES,
        table=table.table,
        merged=fused and table.table > 0,
    )


def _sparse_gradient(ledger: Ledger, table: Lookups, size: int, dim: int) -> None:
    """torch copies a bag's gradient once for every row that was looked up."""
    vector = dim * FLOAT_BYTES
    ledger.add(
        "_embedding_bag_backward",
        size * vector + (table.count + size) * INDEX_BYTES,
        table.count * vector,
        table=table.table,
    )


def _sparse_update(ledger: Ledger, table: Lookups, dim: int, optimizer: str) -> None:
    """Adds the sparse gradient row by row; Adagrad first merges rows that occur twice."""
    if optimizer == "sgd":
        _add_sparse(ledger, "add_", table, table.count, table.scattered, dim)
        return
    vector = dim * FLOAT_BYTES
    merged, values = table.unique * vector, table.unique * dim
    ledger.add(
        "_coalesce",
        table.count * (vector + INDEX_BYTES),
        table.unique * (vector + INDEX_BYTES),
        flops=table.count * dim,
        table=table.table,
    )
    ledger.add("pow", merged, merged, flops=values)
    if optimizer == "rowwise_adagrad":
        _rowwise_adagrad(ledger, table, dim)
        return
    # s += g²; w −= η g / (√s + ε), on the rows that have a gradient
    _add_sparse(ledger, "add_", table, table.unique, table.unique, dim)
    ledger.add(
        "sparse_mask",
        merged + table.unique * INDEX_BYTES,
        merged,
        gather=merged,
        table=table.table,
    )
    ledger.add("sqrt_", merged, merged, flops=values)
    ledger.add("add_", merged, merged, flops=values)
    ledger.add("div", 2 * merged, merged, flops=values)
    _add_sparse(ledger, "add_", table, table.unique, table.unique, dim)


def _rowwise_adagrad(ledger: Ledger, table: Lookups, dim: int) -> None:
    """s += mean(g²), one number a row; w −= η g / (√s + ε)."""
    rows, values = table.unique, table.unique * dim
    merged, scalars = values * FLOAT_BYTES, rows * FLOAT_BYTES
    ledger.add("mean", merged, scalars, flops=values)
    _add_sparse(ledger, "index_add_", table, rows, rows, 1)
    ledger.add("index", scalars + rows * INDEX_BYTES, scalars, gather=scalars, table=table.table)
    for operator in ("sqrt", "add", "reciprocal", "mul"):
        ledger.add(operator, scalars, scalars, flops=rows)
    ledger.add("mul", merged + scalars, merged, flops=values)
    _add_sparse(ledger, "index_add_", table, rows, rows, dim)


def _add_sparse(
    ledger: Ledger, operator: str, table: Lookups, rows: float, scattered: float, dim: int
) -> None:
    """Reads an index, a gradient and a row of the table, and writes the row."""
    values = rows * dim * FLOAT_BYTES
    ledger.add(
        operator,
        2 * values + rows * INDEX_BYTES,
        values,
        flops=2 * rows * dim,
        gather=scattered * dim * FLOAT_BYTES,
        table=table.table,
    )


def _fused_update(ledger: Ledger, table: Lookups, size: int, dim: int, optimizer: str) -> None:
    """Each row that was looked up is read and written once, with its optimiser's state.

    The pooled gradients are read from where the interaction left them; nothing of the
    size of the lookups is written.
    """
    vector = dim * FLOAT_BYTES
    state = {"sgd": 0, "adagrad": vector, "rowwise_adagrad": FLOAT_BYTES}[optimizer]
    rows = table.unique * (vector + state)
    ledger.add(
        "fused_update",
        size * vector + (table.count + size) * INDEX_BYTES + rows,
        rows,
        flops=2 * table.count * dim,
        gather=rows,
        table=table.table,
        merged=table.table > 0,
    )
