"""How tables are spread over ranks: who holds which rows and columns of which table.

Four ways, named as TorchRec names them: ``table_wise`` (a whole table on one rank),
``column_wise`` (slices of its columns, each like a table of its own), ``row_wise`` (blocks
of its rows on all ranks, each summing what it holds of a bag), ``replicated`` (a copy on
every rank, gradients all-reduced). Which one is best where: :mod:`.choice`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.config import Parameters, mean_bag_size

KINDS = ("table_wise", "row_wise", "column_wise", "replicated")

SHARDINGS = (*KINDS, "mixed")
"""Names a plan can have; ``mixed`` has tables of several kinds."""

NARROWEST_COLUMNS = 16
"""Least columns of a column-wise shard: a row of 64 bytes, one cache line."""

LOOKUP_BYTES = 64
"""What a random row costs beside its bytes, in bytes: about a cache line's time."""

SMALL_TABLE_BYTES = 8 << 20
"""Up to this size a table may be replicated in a ``mixed`` plan."""


Number = TypeVar("Number", float, np.ndarray)


def lookup_cost(lookups: Number, columns: int) -> Number:
    """Bytes that a bag costs: its rows, what finding each costs beside them, and its sum."""
    return lookups * (4 * columns + LOOKUP_BYTES) + 4 * columns


@dataclass(frozen=True)
class TablePlan:
    """One table: its kind and the rank of each of its shards."""

    table: int
    rows: int
    dim: int
    kind: str
    ranks: Sequence[int]

    @property
    def shards(self) -> int:
        return len(self.ranks)

    @property
    def columns(self) -> int:
        """Columns of one shard."""
        return self.dim // self.shards if self.kind == "column_wise" else self.dim

    @property
    def shard_rows(self) -> np.ndarray:
        """Rows of each shard; row-wise in blocks of ceil(rows / ranks), as TorchRec cuts them."""
        if self.kind != "row_wise":
            return np.full(self.shards, self.rows, dtype=np.int64)
        block = -(-self.rows // self.shards)
        starts = np.arange(self.shards, dtype=np.int64) * block
        return np.clip(self.rows - starts, 0, block)


@dataclass(frozen=True)
class Plan:
    """Where all tables are. ``lookups`` is the mean bag size of each table."""

    ranks: int
    dim: int
    tables: tuple[TablePlan, ...]
    lookups: tuple[float, ...]

    @property
    def name(self) -> str:
        """One of ``SHARDINGS``."""
        kinds = {table.kind for table in self.tables}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    @property
    def idle_ranks(self) -> int:
        """Ranks that hold nothing of any table."""
        return int((self.table_bytes() == 0).sum())

    def of_kind(self, *kinds: str) -> list[TablePlan]:
        """The tables of these kinds."""
        return [table for table in self.tables if table.kind in kinds]

    def on_ranks(
        self, amount: Callable[[TablePlan], float | np.ndarray], *kinds: str
    ) -> np.ndarray:
        """Sum over the tables of some kinds of an amount of each shard, by rank: shape (ranks,).

        Args:
            amount: of a table's every shard, or of each.
        """
        total = np.zeros(self.ranks)
        for table in self.of_kind(*kinds):
            np.add.at(total, np.asarray(table.ranks), amount(table))
        return total

    def columns_sent(self) -> np.ndarray:
        """Columns of pooled vectors that each rank makes for all samples: shape (ranks,)."""
        return self.on_ranks(lambda table: table.columns, *_EXCHANGED)

    def work(self) -> np.ndarray:
        """Table work on each rank over that of one rank that has all tables: shape (ranks,).

        The sum is 1, and more where tables are cut: a lookup of half a row is more than half a
        lookup (``LOOKUP_BYTES``), and every owner of rows writes a partial sum of every bag. A
        replicated table's work is shared by all (each rank looks up its own samples); a
        row-wise table's lookups by the rows a rank holds, as if they were spread evenly.
        """

        def cost(table: TablePlan) -> float | np.ndarray:
            count = self.lookups[table.table]
            if table.kind == "replicated":
                return lookup_cost(count, table.dim) / self.ranks
            if table.kind == "row_wise":
                return lookup_cost(count * table.shard_rows / table.rows, table.dim)
            return lookup_cost(count, table.columns)

        every = sum(lookup_cost(count, self.dim) for count in self.lookups)
        return self.on_ranks(cost, *KINDS) / (every if every > 0 else 1.0)

    def table_bytes(self) -> np.ndarray:
        """Bytes of weights on each rank, shape (ranks,)."""
        sizes = self.on_ranks(lambda table: table.shard_rows * table.columns * 4, *KINDS)
        return sizes.astype(np.int64)


_EXCHANGED = ("table_wise", "column_wise")


def make_plan(
    parameters: Parameters,
    ranks: int,
    sharding: str | Sequence[str] = "table_wise",
    idle: bool = False,
) -> Plan:
    """Spread the tables of a model over ranks.

    Whole tables and column slices go, most work first, to the rank with least work so far
    (longest processing time first, Graham 1969: at most 4/3 of the best makespan). A
    column-wise table is cut into as many slices as keep ``NARROWEST_COLUMNS`` each and as all
    ranks together can use.

    Args:
        sharding: one of ``SHARDINGS`` for all tables, or a kind for each.
        idle: allow ranks that hold no table and have only their share of the dense part.

    Raises:
        InputError: too many ranks for this sharding, or an unknown kind.
    """
    if ranks < 1:
        raise InputError(f"ranks is {ranks}, expected at least 1")
    kinds = _kinds(parameters, ranks, sharding)
    model = parameters.model
    lookups = tuple(mean_bag_size(parameters, t) for t in range(len(model.table_rows)))
    work = [lookup_cost(n, model.embedding_dim) for n in lookups]
    most = maximum_ranks(parameters, kinds)
    if ranks > most and not idle:
        raise InputError(
            f"ranks is {ranks}, but {sharding if isinstance(sharding, str) else 'this'} sharding "
            f"reaches {most} at most: further ranks would hold no table; row_wise reaches "
            f"{maximum_ranks(parameters, 'row_wise')}, replicated any number"
        )
    parts = {
        table: _parts(model.embedding_dim, ranks, kinds.count("column_wise"))
        if kind == "column_wise"
        else 1
        for table, kind in enumerate(kinds)
    }
    places = _packed(ranks, kinds, work, parts)
    tables = tuple(
        TablePlan(table, rows, model.embedding_dim, kind, places.get(table, range(ranks)))
        for table, (rows, kind) in enumerate(zip(model.table_rows, kinds, strict=True))
    )
    return Plan(ranks, model.embedding_dim, tables, lookups)


def maximum_ranks(parameters: Parameters, sharding: str | Sequence[str]) -> int:
    """Most ranks that each hold something: the study's "maximum ranks" for ``table_wise``.

    table-wise one rank per table; column-wise one per slice of ``NARROWEST_COLUMNS``; row-wise
    one per row of the largest table; replicated and mixed without bound (2^31 here: the
    data-parallel part has no end).
    """
    model = parameters.model
    tables = len(model.table_rows)
    kinds = [sharding] * tables if isinstance(sharding, str) else list(sharding)
    if "replicated" in kinds or "mixed" in kinds:
        return 2**31
    if "row_wise" in kinds:
        rows = [n for n, kind in zip(model.table_rows, kinds, strict=True) if kind == "row_wise"]
        return max(max(rows), tables)
    slices = max(1, model.embedding_dim // NARROWEST_COLUMNS)
    return sum(slices if kind == "column_wise" else 1 for kind in kinds)


def _kinds(parameters: Parameters, ranks: int, sharding: str | Sequence[str]) -> list[str]:
    model = parameters.model
    if not isinstance(sharding, str):
        kinds = list(sharding)
        if len(kinds) != len(model.table_rows):
            raise InputError(
                f"sharding lists {len(kinds)} kinds, the model has {len(model.table_rows)} tables"
            )
    elif sharding == "mixed":
        kinds = _mixed(parameters, ranks)
    else:
        kinds = [sharding] * len(model.table_rows)
    for kind in kinds:
        if kind not in KINDS:
            raise InputError(f"sharding is {kind!r}, expected one of {', '.join(SHARDINGS)}")
    return kinds


def _mixed(parameters: Parameters, ranks: int) -> list[str]:
    """Small tables replicated, tables above a rank's fair share of all bytes row-wise."""
    model = parameters.model
    sizes = [4 * rows * model.embedding_dim for rows in model.table_rows]
    large = [size for size in sizes if size > SMALL_TABLE_BYTES]
    fair = sum(large) / ranks if large else math.inf
    crowded = len(large) < ranks
    return [
        "replicated"
        if size <= SMALL_TABLE_BYTES
        else "row_wise"
        if ranks > 1 and (size > fair or crowded)
        else "table_wise"
        for size in sizes
    ]


def _parts(dim: int, ranks: int, sliced: int) -> int:
    """Slices of a column-wise table: a divisor of its width."""
    wanted = min(max(1, dim // NARROWEST_COLUMNS), max(1, -(-ranks // max(sliced, 1))))
    return min(n for n in range(wanted, dim + 1) if dim % n == 0)


def _packed(
    ranks: int, kinds: Sequence[str], work: Sequence[float], parts: Mapping[int, int]
) -> dict[int, list[int]]:
    """The rank of each whole table and column slice: most work first, to the least loaded.

    Slices of one table go to different ranks as long as there are enough.
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    heapq.heapify(loads)
    places: dict[int, list[int]] = {}
    movable = [t for t, kind in enumerate(kinds) if kind in _EXCHANGED]
    for table in sorted(movable, key=lambda t: (-work[t] / parts[t], t)):
        for _ in range(-(-parts[table] // ranks)):
            count = min(ranks, parts[table] - len(places.get(table, [])))
            taken = [heapq.heappop(loads) for _ in range(count)]
            places.setdefault(table, []).extend(rank for _, rank in taken)
            for load, rank in taken:
                heapq.heappush(loads, (load + work[table] / parts[table], rank))
    return places


def plan_of_placement(parameters: Parameters, placement: pd.DataFrame, ranks: int) -> Plan:
    """The plan that a run really had.

    Args:
        placement: ``table``, ``kind``, ``rank`` as in ``record.csv``, one row per shard.

    Raises:
        InputError: a table is missing, or has an unknown kind.
    """
    model = parameters.model
    tables = []
    for table, rows in enumerate(model.table_rows):
        shards = placement[placement["table"] == table]
        if shards.empty:
            raise InputError(f"placement: table {table} of {len(model.table_rows)} is missing")
        kind = str(shards["kind"].iloc[0])
        if kind not in KINDS:
            raise InputError(
                f"placement: kind of table {table} is {kind!r}, expected one of {', '.join(KINDS)}"
            )
        held = [int(rank) for rank in shards["rank"]]
        tables.append(TablePlan(table, rows, model.embedding_dim, kind, held))
    lookups = tuple(mean_bag_size(parameters, t) for t in range(len(model.table_rows)))
    return Plan(ranks, model.embedding_dim, tuple(tables), lookups)
