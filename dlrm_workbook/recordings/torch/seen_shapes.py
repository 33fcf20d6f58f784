"""The shapes at which a recorded program was seen to compute.

Our own model's shapes follow from its parameters. Another program's are those of the operators
that were recorded: its matrix products and its lookups of embedding rows. The ceilings of its
machine are measured at them. Needs torch and numpy only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrm_workbook.evidence.ceilings import Product, Shapes

MOST_PRODUCTS = 24
"""Products that are timed; those with the most operations."""

COMMON_SIZE = 1024
"""Each size of the product that is timed for a program which multiplies no matrices."""

LEFT_OPERAND = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Operators that multiply matrices, and the place of the left one among their inputs."""

PRODUCT_LAYOUTS = {"aten::addmm": ("forward",), "aten::mm": ("backward_input", "backward_weight")}
"""The layouts in which the products of an operator are timed; others have the plain one."""

_LOOKUP = re.compile(r"^\[\[(\d+), (\d+)\], \[(\d+|\*)\], \[(\d+)\](?:, \[\]){4}")
"""Inputs of a lookup: a table of rows by width, indices, offsets (one for each bag), no weights."""


def product_of(name: str, shapes: str) -> tuple[int, int, int, int] | None:
    """(batch, m, n, k) of an operator that multiplies matrices; None for others. ``shapes`` are its
    inputs', as a trace has them; a size that differs from call to call is ``*``."""
    place = LEFT_OPERAND.get(name)
    if place is None:
        return None
    try:
        left, right = json.loads(shapes)[place : place + 2]
        numbers = [*left, *right]
    except (ValueError, TypeError, RecursionError):
        return None
    if not all(type(number) is int for number in numbers):
        return None
    if len(left) == 2 and len(right) == 2:
        return 1, left[0], right[1], left[1]
    if len(left) == 3 and len(right) == 3:
        return left[0], left[1], right[2], left[2]
    return None


def lookup_of(name: str, shapes: str) -> tuple[int, int, int | None, int] | None:
    """(rows of the table, its width, lookups, bags) of pooled lookups; None for other operators.
    ``shapes`` are as :func:`product_of` takes them; lookups that differ from call to call are None.
    """
    match = _LOOKUP.match(shapes) if name.startswith("aten::_embedding_bag") else None
    if match is None:
        return None
    lookups = None if match[3] == "*" else int(match[3])
    return int(match[1]), int(match[2]), lookups, int(match[4])


def seen_shapes(averages: Iterable[Mapping[str, Any]], threads: int) -> Shapes:
    """The shapes of a recorded program, of the ``name``, ``shapes`` and ``count`` of its operators,
    each of which has so many CPU ``threads``.

    The shapes of a product without a bias do not say which of its operands is transposed, so it is
    timed in both layouts of a backward pass.
    """
    # loads torch, and what reads the shapes of a recording does without
    from dlrm_workbook.evidence.ceilings import Product, Shapes

    operations: dict[Product, float] = {}
    tables: list[tuple[int, int, int, int, int]] = []
    for row in averages:
        name, shapes = str(row["name"]), str(row["shapes"])
        if (sizes := product_of(name, shapes)) is not None and min(sizes) > 0:
            batch, m, n, k = sizes
            for phase in PRODUCT_LAYOUTS.get(name, ("backward_input",)):
                product = Product("", -1, phase, m, n, k, batch)
                seen = operations.get(product, 0.0)
                operations[product] = seen + float(product.flops) * row["count"]
        elif (lookup := lookup_of(name, shapes)) is not None:
            rows, width, lookups, bags = lookup
            if lookups and bags:
                tables.append((rows * width, rows, width, max(1, round(lookups / bags)), bags))
    most = sorted(operations, key=lambda product: -operations[product])[:MOST_PRODUCTS]
    _, rows, width, bag, bags = max(tables, default=(0, 0, 0, 1, 1))
    common = Product("", -1, "forward", COMMON_SIZE, COMMON_SIZE, COMMON_SIZE)
    return Shapes(most or [common], threads, width, rows, bag, bags)
