"""Operators of a training step with their arithmetic and bytes, as the model's kinds list them.

An interaction, an optimiser and a loss say which of torch's operators they run and on how much;
what a step must compute and move, which products are worth timing, and what a page's roofline
shows all follow from that one list. Views cost nothing and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

FLOAT_BYTES = 4
INDEX_BYTES = 8
"""torch's indices are int64."""

NUMBER_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""``training.precision`` to the bytes of an activation."""


@dataclass(frozen=True)
class Work:
    """One operator of an iteration. All amounts are of one execution.

    ``read_bytes`` and ``written_bytes`` are the operator's operands, each tensor once;
    ``gather_bytes`` of those read lie in rows scattered over a table.
    """

    component: str
    phase: str
    operator: str  # as torch names it, without aten::
    count: int  # executions in an iteration
    flops: float
    read_bytes: float
    written_bytes: float
    gather_bytes: float = 0.0
    # of matrix products, `batch` times (m, k) by (k, n): the layer of its part, input side first,
    # and which product it is: forward, backward_input or backward_weight
    layer: int = -1
    product: str = ""
    batch: int = 0
    m: int = 0
    n: int = 0
    k: int = 0
    table: int = -1  # of lookups: which table
    merged: bool = False  # not a call of its own: one call does this for all tables
    on_link: bool = False  # moves over the link between host and device, not through memory alone


class Operations:
    """Collects the operators of an iteration in ``work``, for one part and phase at a time.

    An activation has ``element`` bytes; a CPU ``widens`` 2-byte numbers before it gathers from
    them.
    """

    def __init__(self, element: int = FLOAT_BYTES, widens: bool = False) -> None:
        self.element, self.narrow = element, element != FLOAT_BYTES
        self.widens = widens and self.narrow
        self.work: list[Work] = []
        self._part = ("other", "", 1)

    @contextmanager
    def part(self, component: str, phase: str, count: int = 1) -> Iterator[None]:
        """What is added inside belongs to this part and runs ``count`` times."""
        before, self._part = self._part, (component, phase, count)
        try:
            yield
        finally:
            self._part = before

    def add(self, operator: str, read: float, written: float, **more: Any) -> None:
        """An operator that reads and writes so many bytes; ``more`` attributes of Work."""
        component, phase, count = self._part
        flops = float(more.pop("flops", 0.0))
        row = Work(component, phase, operator, count, flops, float(read), float(written), **more)
        self.work.append(row)

    def cast(self, elements: float, before: int, after: int) -> None:
        """A copy in another precision: bytes of an element before and after."""
        self.add("_to_copy", elements * before, elements * after)

    def pointwise(self, operator: str, elements: float, operands: int, element: int) -> None:
        """One operation an element; ``operands`` tensors in, one out."""
        self.add(operator, operands * elements * element, elements * element, flops=elements)

    def gathered(self, rows: int, source: int, wanted: int) -> None:
        """``wanted`` of ``source`` columns by an index."""
        wide = FLOAT_BYTES if self.widens else self.element
        if self.widens:
            self.cast(rows * source, self.element, wide)
        least = rows * min(source, wanted) * wide
        self.add("index_select", least + wanted * INDEX_BYTES, rows * wanted * wide)
        if self.widens:
            self.cast(rows * wanted, wide, self.element)

    def product(
        self,
        operator: str,
        product: str,
        shape: tuple[int, int, int],
        *,
        element: int = 0,
        batch: int = 1,
        layer: int = 0,
        bias: bool = False,
        symmetric: bool = False,
        accumulate: bool = False,
    ) -> None:
        """A matrix product, ``batch`` times (m, k) by (k, n): 2 m n k operations each.

        Args:
            shape: m, n, k.
            element: bytes of an element; 0: of an activation.
            bias: a vector (n,) is added.
            symmetric: the second operand is the first one transposed, read once.
            accumulate: the result is added to what is there.
        """
        (m, n, k), element = shape, element or self.element
        operands = m * k + (0 if symmetric else k * n) + (m * n if accumulate else 0)
        self.add(
            operator,
            element * (batch * operands + (n if bias else 0)),
            element * batch * m * n,
            flops=2.0 * batch * m * n * k,  # as torch counts: adding the bias is free
            layer=layer,
            product=product,
            batch=batch,
            m=m,
            n=n,
            k=k,
        )

    def weight_gradients(self, rows: int, m: int, n: int, layer: int, bias: bool) -> None:
        """Gradients of a linear layer's weight (m, n) and bias (m,), summed over the rows."""
        self.product("mm", "backward_weight", (m, n, rows), layer=layer)
        self.widened(n * m)
        if bias:
            self.add("sum", rows * m * self.element, m * self.element, flops=rows * m)
            self.widened(m)

    def widened(self, elements: float) -> None:
        """A copy of activations in float32, which they may be already."""
        if self.narrow:
            self.cast(elements, self.element, FLOAT_BYTES)

    def norm(self, groups: int, size: int, *, backward: bool = False) -> None:
        """A layer norm of each group of so many activations, with a scale and a shift in float32.

        About 7 operations a number, 14 in backward. A GPU's autocast computes it in float32.
        """
        count = groups * size
        wide = FLOAT_BYTES if self.narrow and not self.widens else self.element
        values, weights = count * wide, 2 * size * FLOAT_BYTES
        statistics = 2 * groups * FLOAT_BYTES
        if wide != self.element:
            self.cast(count, self.element, wide)
        if backward:
            read, written = 2 * values + weights + statistics, values + weights
            self.add("native_layer_norm_backward", read, written, flops=14 * count)
        else:
            read, written = values + weights, values + statistics
            self.add("native_layer_norm", read, written, flops=7 * count)
        if wide != self.element:
            self.cast(count, wide, self.element)
