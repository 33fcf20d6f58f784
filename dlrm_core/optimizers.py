"""How weights follow their gradients: one class a kind (``training.optimizer``).

A kind says itself: torch's optimisers of the tables and of the dense part, the state it keeps,
the operators and temporaries of an update, whether rows of 2 bytes a number can be rounded, and
which engines know it. Nothing here needs torch: :mod:`dlrm_core.embeddings` and
:mod:`dlrm_core.step` make what a kind names.

Notation: R rows of a table, d embedding width, g gradient, w weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from dlrm_core.base.settings import register
from dlrm_core.operations import FLOAT_BYTES, INDEX_BYTES, Operations

EPSILON = 1e-10
"""Added to the root in both Adagrads: torch's default, and facebook's for row-wise Adagrad."""

UPDATING_ENGINES = frozenset(
    {"fused embeddings", "fused embeddings on a GPU", "FBGEMM", "several ranks: tables"}
)
"""Those that update tables, of which a kind names the ones that know it."""


@dataclass(frozen=True)
class Lookups:
    """What one batch asks of one table, on average.

    ``count`` indices, of ``unique`` different rows; ``scattered`` lookups have their row anywhere
    in the table: all of them by a uniform law. By a skewed one, rows repeat more often than they
    would by chance; those repeats find their row in the cache.
    """

    table: int
    rows: int
    count: float
    unique: float
    scattered: float


class Pass(NamedTuple):
    """An operator over whole weights: tensors read and written, and operations a number."""

    operator: str
    reads: int
    writes: int
    flops: int


class Optimizer:
    """A kind of optimiser; subclasses are the kinds."""

    kind: ClassVar[str]  # its name, the value of training.optimizer
    about: ClassVar[str]  # what it is, in a few words of `dlrm parameters`
    dense: ClassVar[str]  # torch's optimiser of the dense weights
    # that of the tables' sparse gradients, torch's or one of dlrm_core.embeddings, and what it is
    # given beside weights and rate
    tables: ClassVar[tuple[str, dict[str, Any]]]
    fused_on: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})  # where torch has a fused one
    dense_passes: ClassVar[tuple[Pass, ...]]  # operators of a dense part's update, in turn
    fused_pass: ClassVar[Pass | None] = None  # what torch's fused kernel does in their place
    dense_state: ClassVar[int]  # numbers kept for each weight, of a table too unless per_row
    table_copies: ClassVar[int]  # of a sparse gradient in torch's update: coalesced, squared...
    per_row: ClassVar[bool] = False  # whether it keeps one number a row, whatever the width
    # whether an update adds each lookup's gradient on its own, in any order; else it needs a row's
    # whole gradient
    adds: ClassVar[bool] = False
    takes_zero_rate: ClassVar[bool] = True  # whether torch's of tables can be made with rate 0
    why_no_rounding: ClassVar[str] = ""  # why rows of 2 bytes a number cannot be updated
    engines: ClassVar[frozenset[str]] = UPDATING_ENGINES  # those that know it
    fbgemm: ClassVar[str] = ""  # its name in FBGEMM; empty where it has none

    def __init_subclass__(cls) -> None:
        """Register the kind; TypeError where it leaves something out."""
        asked = ("kind", "about", "dense", "tables", "dense_state", "table_copies")
        register(cls, Optimizer, OPTIMIZERS, (*asked, "dense_passes", "table_work"))

    @classmethod
    def row_state(cls, dim: int) -> int:
        """Numbers kept for a row of a table."""
        return 1 if cls.per_row else cls.dense_state * dim

    @classmethod
    def dense_work(cls, ops: Operations, sizes: Sequence[int], fused: bool) -> None:
        """Add the operators of an update of weights of these sizes, perhaps by a fused kernel."""
        passes = [cls.fused_pass] if fused and cls.fused_pass else cls.dense_passes
        for size in sizes:
            for operator, reads, writes, flops in passes:
                whole = size * FLOAT_BYTES
                ops.add(operator, reads * whole, writes * whole, flops=flops * size)

    @staticmethod
    def table_work(ops: Operations, table: Lookups, dim: int) -> None:
        """Add the operators of torch's update of one table by its sparse gradient."""
        raise NotImplementedError


OPTIMIZERS: dict[str, type[Optimizer]] = {}
"""The kinds by their names, in the order in which they are explained."""


def rows_work(
    ops: Operations, operator: str, table: Lookups, rows: float, scattered: float, width: int
) -> None:
    """An index, a gradient and a row are read and the row is written, ``rows`` times."""
    values = rows * width * FLOAT_BYTES
    ops.add(
        operator,
        2 * values + rows * INDEX_BYTES,
        values,
        flops=2 * rows * width,
        gather_bytes=scattered * width * FLOAT_BYTES,
        table=table.table,
    )


def _coalesced(ops: Operations, table: Lookups, dim: int) -> tuple[float, float, float]:
    """Gradients of rows that occur twice are merged: different rows, their numbers and bytes."""
    vector = dim * FLOAT_BYTES
    ops.add(
        "_coalesce",
        table.count * (vector + INDEX_BYTES),
        table.unique * (vector + INDEX_BYTES),
        flops=table.count * dim,
        table=table.table,
    )
    return table.unique, table.unique * dim, table.unique * vector


def _masked(ops: Operations, table: Lookups, rows: float, merged: float) -> None:
    """State of the rows that have a gradient."""
    read = merged + rows * INDEX_BYTES
    ops.add("sparse_mask", read, merged, gather_bytes=merged, table=table.table)


class Sgd(Optimizer):
    """w -= rate g."""

    kind = "sgd"
    about = "plain"
    dense = "SGD"
    tables = ("SGD", {"foreach": False})
    dense_passes = (Pass("add_", 2, 1, 2),)
    dense_state = 0
    table_copies = 0
    adds = True
    fbgemm = "EXACT_SGD"

    @staticmethod
    def table_work(ops: Operations, table: Lookups, dim: int) -> None:
        rows_work(ops, "add_", table, table.count, table.scattered, dim)


class Adagrad(Optimizer):
    """s += g^2; w -= rate g / (sqrt(s) + eps), on the rows that have a gradient."""

    kind = "adagrad"
    about = "one accumulator per weight"
    dense = "Adagrad"
    tables = ("Adagrad", {"eps": EPSILON, "foreach": False})
    fused_on = frozenset({"cpu"})
    dense_passes = (
        Pass("addcmul_", 2, 1, 2),
        Pass("sqrt", 1, 1, 1),
        Pass("add_", 1, 1, 1),
        Pass("addcdiv_", 3, 1, 3),
    )
    fused_pass = Pass("_fused_adagrad_", 3, 2, 7)
    dense_state = 1
    table_copies = 3
    fbgemm = "EXACT_ADAGRAD"

    @staticmethod
    def table_work(ops: Operations, table: Lookups, dim: int) -> None:
        rows, values, merged = _coalesced(ops, table, dim)
        ops.add("pow", merged, merged, flops=values)
        rows_work(ops, "add_", table, rows, rows, dim)
        _masked(ops, table, rows, merged)
        for operator, operands in (("sqrt_", 1), ("add_", 1), ("div", 2)):
            ops.add(operator, operands * merged, merged, flops=values)
        rows_work(ops, "add_", table, rows, rows, dim)


class AdagradByRow(Adagrad):
    """s += mean(g^2), one number a row; w -= rate g / (sqrt(s) + eps).

    A row's state makes sense for tables only: the dense weights follow plain Adagrad.
    """

    kind = "rowwise_adagrad"
    about = "one accumulator per row"
    tables = ("RowwiseAdagrad", {"eps": EPSILON})
    table_copies = 2
    per_row = True
    fbgemm = "EXACT_ROWWISE_ADAGRAD"

    @staticmethod
    def table_work(ops: Operations, table: Lookups, dim: int) -> None:
        rows, values, merged = _coalesced(ops, table, dim)
        scalars = rows * FLOAT_BYTES
        ops.add("pow", merged, merged, flops=values)
        ops.add("mean", merged, scalars, flops=values)
        rows_work(ops, "index_add_", table, rows, rows, 1)
        read = scalars + rows * INDEX_BYTES
        ops.add("index", read, scalars, gather_bytes=scalars, table=table.table)
        for operator in ("sqrt", "add", "reciprocal", "mul"):
            ops.add(operator, scalars, scalars, flops=rows)
        ops.add("mul", merged + scalars, merged, flops=values)
        rows_work(ops, "index_add_", table, rows, rows, dim)


class Adam(Optimizer):
    """m and v, means of g and g^2; w -= rate m / (sqrt(v) + eps), corrected for their start.

    Of a table only the rows looked up change (torch's SparseAdam).
    """

    kind = "adam"
    about = "of the rows looked up only, torch's SparseAdam"
    dense = "Adam"
    tables = ("SparseAdam", {})
    dense_passes = (
        Pass("lerp_", 2, 1, 3),
        Pass("mul_", 1, 1, 1),
        Pass("addcmul_", 2, 1, 2),
        Pass("sqrt", 1, 1, 1),
        Pass("div", 1, 1, 1),
        Pass("add_", 1, 1, 1),
        Pass("addcdiv_", 3, 1, 3),
    )
    fused_pass = Pass("_fused_adam_", 4, 3, 12)
    dense_state = 2
    table_copies = 6
    takes_zero_rate = False
    why_no_rounding = "Adam's update has no stochastic rounding; choose sgd or an Adagrad"
    engines = frozenset()

    @staticmethod
    def table_work(ops: Operations, table: Lookups, dim: int) -> None:
        rows, values, merged = _coalesced(ops, table, dim)
        for squared in (False, True):
            _masked(ops, table, rows, merged)
            if squared:
                ops.add("pow", merged, merged, flops=values)
            ops.add("sub", 2 * merged, merged, flops=values)
            ops.add("mul_", merged, merged, flops=values)
            rows_work(ops, "add_", table, rows, rows, dim)
        last = (("add_", 2), ("add_", 2), ("sqrt_", 1), ("add_", 1), ("div_", 2), ("mul", 1))
        for operator, operands in last:
            ops.add(operator, operands * merged, merged, flops=values)
        rows_work(ops, "add_", table, rows, rows, dim)
