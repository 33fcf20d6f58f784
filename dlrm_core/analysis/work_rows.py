"""Rows of work: one operator, what it computes and what it moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import pandas as pd

FLOAT_BYTES = 4
INDEX_BYTES = 8
"""torch's indices are int64."""


@dataclass(frozen=True)
class Work:
    """One operator of an iteration. All amounts are of one execution.

    ``read_bytes`` and ``written_bytes`` are the operator's operands, each tensor once;
    ``gather_bytes`` of those read lie in rows scattered over a table.
    """

    component: str
    phase: str
    operator: str
    """As torch names it, without ``aten::``."""
    count: int
    """Executions in an iteration."""
    flops: float
    read_bytes: float
    written_bytes: float
    gather_bytes: float = 0.0
    layer: int = -1
    """Of matrix products: the layer of its MLP, input side first."""
    product: str = ""
    """Of matrix products: ``forward``, ``backward_input`` or ``backward_weight``."""
    batch: int = 0
    m: int = 0
    n: int = 0
    k: int = 0
    """Of matrix products: ``batch`` times (m, k) by (k, n)."""
    table: int = -1
    """Of lookups: which table."""
    merged: bool = False
    """Not a call of its own: one call does this for all tables."""
    on_link: bool = False
    """Moves over the link between host and device, not through memory alone."""


COLUMNS = list(Work.__dataclass_fields__)


class Ledger:
    """Collects rows of work, for one part and phase at a time."""

    def __init__(self) -> None:
        self.rows: list[Work] = []
        self._part = ("other", "")
        self._count = 1

    @contextmanager
    def part(self, component: str, phase: str, count: int = 1) -> Iterator[None]:
        """What is added inside belongs to this part and runs ``count`` times."""
        before = self._part, self._count
        self._part, self._count = (component, phase), count
        try:
            yield
        finally:
            self._part, self._count = before

    def add(
        self,
        operator: str,
        read: float,
        written: float,
        *,
        flops: float = 0.0,
        gather: float = 0.0,
        table: int = -1,
        merged: bool = False,
        on_link: bool = False,
    ) -> None:
        """An operator that reads and writes so many bytes."""
        self.rows.append(
            Work(
                *self._part,
                operator,
                self._count,
                float(flops),
                float(read),
                float(written),
                float(gather),
                table=table,
                merged=merged,
                on_link=on_link,
            )
        )

    def cast(self, elements: float, before: int, after: int) -> None:
        """A copy in another precision: bytes of an element before and after."""
        self.add("_to_copy", elements * before, elements * after)

    def product(
        self,
        operator: str,
        product: str,
        m: int,
        n: int,
        k: int,
        element: int,
        *,
        batch: int = 1,
        layer: int = -1,
        bias: bool = False,
        symmetric: bool = False,
        accumulate: bool = False,
    ) -> None:
        """A matrix product, ``batch`` times (m, k) by (k, n): 2 m n k operations each.

        Args:
            element: bytes of an element.
            bias: a vector (n,) is added.
            symmetric: the second operand is the first one transposed, read once.
            accumulate: the result is added to what is there.
        """
        operands = m * k if symmetric else m * k + k * n
        if accumulate:
            operands += m * n
        self.rows.append(
            Work(
                *self._part,
                operator,
                self._count,
                # as torch counts: adding the bias is free
                2.0 * batch * m * n * k,
                element * (batch * operands + (n if bias else 0)),
                element * batch * m * n,
                layer=layer,
                product=product,
                batch=batch,
                m=m,
                n=n,
                k=k,
            )
        )

    def table(self) -> pd.DataFrame:
        """All rows, a column an attribute of :class:`Work`."""
        return pd.DataFrame([asdict(row) for row in self.rows], columns=COLUMNS)
