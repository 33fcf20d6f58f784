"""How weights follow their gradients: one class a kind (``training.optimizer``).

A kind says itself: torch's optimisers of the tables and of the dense part, the state it keeps,
the operators and temporaries of an update, whether rows of 2 bytes a number can be rounded, and
which engines know it. Nothing here needs torch: :mod:`dlrm_core.embeddings` and
:mod:`dlrm_core.step` make what a kind names.

Notation: R rows of a table, d embedding width, g gradient, w weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from dlrm_core.base.settings import register
from dlrm_core.operations import FLOAT_BYTES, INDEX_BYTES, Operations

EPSILON = 1e-10
"""Added to the root in both Adagrads: torch's default, and facebook's for row-wise Adagrad."""

UPDATING_ENGINES = frozenset(
    {"fused embeddings", "fused embeddings on a GPU", "FBGEMM", "several ranks: tables"}
)
"""Those that update tables, of which a kind names the ones that know it."""


class LookedUp(Protocol):
    """What one batch asks of one table, on average."""

    @property
    def table(self) -> int:
        """Its number."""

    @property
    def count(self) -> float:
        """Indices a batch."""

    @property
    def unique(self) -> float:
        """Different rows a batch."""

    @property
    def scattered(self) -> float:
        """Lookups whose row lies anywhere in the table."""


class Optimizer:
    """A kind of optimiser; subclasses are the kinds.

    Class attributes:
        kind: its name, the value of ``training.optimizer``.
        about: what it is, in a few words of ``dlrm parameters``.
        dense: name of torch's optimiser of the dense weights.
        dense_name: what that is called on pages.
        tables: name of the optimiser of the tables' sparse gradients, torch's or one of
            :mod:`dlrm_core.embeddings`, and what it is given beside weights and rate.
        fused_on: devices whose fused kernel torch has.
        dense_state: numbers kept for each dense weight.
        table_copies: copies of a table's sparse gradient alive in torch's update: coalesced,
            squared...
        per_row: whether it keeps one number a row, whatever the width.
        adds: whether an update adds each lookup's gradient on its own, in any order; else it
            needs a row's whole gradient.
        takes_zero_rate: whether torch's optimiser of tables can be made with a rate of 0.
        why_no_rounding: why rows of 2 bytes a number cannot be updated; empty if they can.
        engines: those of :data:`UPDATING_ENGINES` that know it.
        fbgemm: its name in FBGEMM; empty where it has none.
    """

    kind: ClassVar[str]
    about: ClassVar[str]
    dense: ClassVar[str]
    tables: ClassVar[tuple[str, dict[str, Any]]]
    fused_on: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    dense_state: ClassVar[int]
    table_copies: ClassVar[int]
    per_row: ClassVar[bool] = False
    adds: ClassVar[bool] = False
    takes_zero_rate: ClassVar[bool] = True
    why_no_rounding: ClassVar[str] = ""
    engines: ClassVar[frozenset[str]] = UPDATING_ENGINES
    fbgemm: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        """Register the kind; TypeError where it leaves something out."""
        asked = ("kind", "about", "dense", "tables", "dense_state", "table_copies", "row_state")
        register(cls, Optimizer, OPTIMIZERS, (*asked, "dense_work", "table_work"))

    @staticmethod
    def row_state(dim: int) -> int:
        """Numbers kept for a row of a table."""
        raise NotImplementedError

    @staticmethod
    def dense_work(ops: Operations, sizes: Sequence[int], fused: bool) -> None:
        """Add the operators of a part's update.

        Args:
            sizes: numbers of each weight.
            fused: by torch's fused kernel.
        """
        raise NotImplementedError

    @staticmethod
    def table_work(ops: Operations, table: LookedUp, dim: int) -> None:
        """Add the operators of torch's update of one table by its sparse gradient."""
        raise NotImplementedError


OPTIMIZERS: dict[str, type[Optimizer]] = {}
"""The kinds by their names, in the order in which they are explained."""


def rows_work(
    ops: Operations, operator: str, table: LookedUp, rows: float, scattered: float, width: int
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


def _coalesced(ops: Operations, table: LookedUp, dim: int) -> tuple[float, float, float]:
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


def _masked(ops: Operations, table: LookedUp, rows: float, merged: float) -> None:
    """State of the rows that have a gradient."""
    read = merged + rows * INDEX_BYTES
    ops.add("sparse_mask", read, merged, gather_bytes=merged, table=table.table)


class Sgd(Optimizer):
    """w -= rate g."""

    kind = "sgd"
    about = "plain"
    dense = "SGD"
    tables = ("SGD", {"foreach": False})
    dense_state = 0
    table_copies = 0
    adds = True
    fbgemm = "EXACT_SGD"

    @staticmethod
    def row_state(dim: int) -> int:
        """It keeps nothing."""
        return 0

    @staticmethod
    def dense_work(ops: Operations, sizes: Sequence[int], fused: bool) -> None:
        """One pass over weights and gradients."""
        for size in sizes:
            whole = size * FLOAT_BYTES
            ops.add("add_", 2 * whole, whole, flops=2 * size)

    @staticmethod
    def table_work(ops: Operations, table: LookedUp, dim: int) -> None:
        """The sparse gradient is added row by row."""
        rows_work(ops, "add_", table, table.count, table.scattered, dim)


class Adagrad(Optimizer):
    """s += g^2; w -= rate g / (sqrt(s) + eps), on the rows that have a gradient."""

    kind = "adagrad"
    about = "one accumulator per weight"
    dense = "Adagrad"
    tables = ("Adagrad", {"eps": EPSILON, "foreach": False})
    fused_on = frozenset({"cpu"})
    dense_state = 1
    table_copies = 3
    fbgemm = "EXACT_ADAGRAD"

    @staticmethod
    def row_state(dim: int) -> int:
        """A sum a weight."""
        return dim

    @staticmethod
    def dense_work(ops: Operations, sizes: Sequence[int], fused: bool) -> None:
        """The squares are summed, then weights follow gradients over roots."""
        for size in sizes:
            whole = size * FLOAT_BYTES
            if fused:
                ops.add("_fused_adagrad_", 3 * whole, 2 * whole, flops=7 * size)
                continue
            ops.add("addcmul_", 2 * whole, whole, flops=2 * size)
            ops.add("sqrt", whole, whole, flops=size)
            ops.add("add_", whole, whole, flops=size)
            ops.add("addcdiv_", 3 * whole, whole, flops=3 * size)

    @staticmethod
    def table_work(ops: Operations, table: LookedUp, dim: int) -> None:
        """The same on merged rows."""
        rows, values, merged = _coalesced(ops, table, dim)
        ops.add("pow", merged, merged, flops=values)
        rows_work(ops, "add_", table, rows, rows, dim)
        _masked(ops, table, rows, merged)
        ops.add("sqrt_", merged, merged, flops=values)
        ops.add("add_", merged, merged, flops=values)
        ops.add("div", 2 * merged, merged, flops=values)
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
    def row_state(dim: int) -> int:
        """A sum a row."""
        return 1

    @staticmethod
    def table_work(ops: Operations, table: LookedUp, dim: int) -> None:
        """A mean and a root a row, then the rows change."""
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
    dense_state = 2
    table_copies = 6
    takes_zero_rate = False
    why_no_rounding = "Adam's update has no stochastic rounding; choose sgd or an Adagrad"
    engines = frozenset()

    @staticmethod
    def row_state(dim: int) -> int:
        """Two means a weight."""
        return 2 * dim

    @staticmethod
    def dense_work(ops: Operations, sizes: Sequence[int], fused: bool) -> None:
        """Both means follow the gradient, then weights follow their quotient."""
        for size in sizes:
            whole = size * FLOAT_BYTES
            if fused:
                ops.add("_fused_adam_", 4 * whole, 3 * whole, flops=12 * size)
                continue
            ops.add("lerp_", 2 * whole, whole, flops=3 * size)
            ops.add("mul_", whole, whole, flops=size)
            ops.add("addcmul_", 2 * whole, whole, flops=2 * size)
            for operator in ("sqrt", "div", "add_"):
                ops.add(operator, whole, whole, flops=size)
            ops.add("addcdiv_", 3 * whole, whole, flops=3 * size)

    @staticmethod
    def table_work(ops: Operations, table: LookedUp, dim: int) -> None:
        """The same on merged rows, whose means are gathered and added back."""
        rows, values, merged = _coalesced(ops, table, dim)
        for squared in (False, True):
            _masked(ops, table, rows, merged)
            if squared:
                ops.add("pow", merged, merged, flops=values)
            ops.add("sub", 2 * merged, merged, flops=values)
            ops.add("mul_", merged, merged, flops=values)
            rows_work(ops, "add_", table, rows, rows, dim)
        for operator, operands in (("add_", 2), ("add_", 2), ("sqrt_", 1), ("add_", 1)):
            ops.add(operator, operands * merged, merged, flops=values)
        ops.add("div_", 2 * merged, merged, flops=values)
        ops.add("mul", merged, merged, flops=values)
        rows_work(ops, "add_", table, rows, rows, dim)
