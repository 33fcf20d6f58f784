"""Operations and bytes of operators, from the shapes and types of their inputs.

A trace recorded with ``record_shapes`` says what each operator was given. For a matrix product
and for a pooled lookup that tells how many operations it takes and which bytes it must read and
write. For others it does not: a convolution's output depends on its stride, attention's work on
its mask, FBGEMM's lookups on widths that are values and not shapes.

A product of (m, k) by (k, n) takes 2 m n k operations, and m n more where something is added to
it; each operand is read once and the result written once. A lookup of N rows of width d in B
bags takes N d additions (twice that with weights); it asks for N rows, N indices and B offsets,
and writes B rows. Rows that occur twice may come from a cache.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pandas as pd

from dlrm_workbook.recordings.profile import inclusive_from_exclusive

TYPES: dict[str, tuple[str, int]] = {
    "float": ("fp32", 4),
    "double": ("fp64", 8),
    "c10::Half": ("fp16", 2),
    "c10::BFloat16": ("bf16", 2),
    "c10::Float8_e4m3fn": ("fp8", 1),
    "c10::Float8_e5m2": ("fp8", 1),
    "signed char": ("int8", 1),
    "long int": ("int64", 8),
    "long": ("int64", 8),
    "int": ("int32", 4),
}
"""Types of tensors as a trace writes them: to the name of their precision, and bytes."""

UNKNOWN = "unknown"
"""The precision of operands whose types the trace does not have."""

OPERATIONS = "operations:"
"""What metrics of operations begin with; the precision of the operands follows."""

OPERAND_BYTES = "operand_bytes"

Shape = list[int]
Amounts = tuple[float, list[tuple[int, int]]]
"""Operations, and (input whose type counts, elements) of everything read and written."""


def _product(a: Shape, b: Shape, first: int, added: Shape | None = None) -> Amounts | None:
    """``a`` (..., m, k) by ``b`` (..., k, n); they are inputs ``first`` and ``first + 1``."""
    if len(a) != len(b) or len(a) not in (2, 3) or a[-1] != b[-2] or a[:-2] != b[:-2]:
        return None
    result = math.prod(a[:-1]) * b[-1]
    operations = 2.0 * result * a[-1]
    moved = [(first, math.prod(a)), (first + 1, math.prod(b)), (first, result)]
    if added is not None:
        operations += result
        moved.append((0, math.prod(added)))
    return operations, moved


def _embedding_bag(shapes: list[Shape]) -> Amounts | None:
    table, indices, offsets = shapes[0], shapes[1], shapes[2]
    if len(table) != 2 or len(indices) != 1 or len(offsets) != 1:
        return None
    width, rows, bags = table[1], indices[0], offsets[0]
    weights = shapes[6][0] if len(shapes) > 6 and len(shapes[6]) == 1 else 0
    moved = [(0, rows * width), (1, rows), (2, bags), (0, bags * width), (0, weights)]
    return (2.0 if weights else 1.0) * rows * width, moved


def _linear(shapes: list[Shape]) -> Amounts | None:
    """(..., k) by the transpose of (n, k)."""
    a, weight = shapes[0], shapes[1]
    if len(a) < 1 or len(weight) != 2:
        return None
    rows = [math.prod(a[:-1]), a[-1]]
    biased = shapes[2] if len(shapes) > 2 and shapes[2] else None
    found = _product(rows, weight[::-1], 0, biased)
    if found and biased:
        found[1][-1] = (2, math.prod(biased))
    return found


def _vector(matrix: Shape, vector: Shape, first: int, added: Shape | None = None) -> Amounts | None:
    return _product(matrix, [*vector, 1], first, added) if len(vector) == 1 else None


FORMULAS: dict[str, Callable[[list[Shape]], Amounts | None]] = {
    "aten::mm": lambda s: _product(s[0], s[1], 0),
    "aten::bmm": lambda s: _product(s[0], s[1], 0),
    "aten::mv": lambda s: _vector(s[0], s[1], 0),
    "aten::linear": _linear,
    "aten::_embedding_bag": _embedding_bag,
    "aten::_embedding_bag_forward_only": _embedding_bag,
    "aten::embedding_bag": _embedding_bag,
}
_ADDING: dict[str, Callable[[list[Shape]], Amounts | None]] = {
    "aten::addmm": lambda s: _product(s[1], s[2], 1, s[0]),
    "aten::_addmm_activation": lambda s: _product(s[1], s[2], 1, s[0]),
    "aten::baddbmm": lambda s: _product(s[1], s[2], 1, s[0]),
    "aten::addmv": lambda s: _vector(s[1], s[2], 1, s[0]),
}
FORMULAS |= _ADDING | {f"{name}_": formula for name, formula in _ADDING.items()}
"""Operators whose work their shapes tell. Of nested ones the innermost counts."""


def work_of_call(name: str, shapes: str, types: str) -> tuple[float, float, str] | None:
    """(operations, bytes, precision) of one call, None where its inputs do not tell.

    Args:
        shapes, types: as a trace has them: ``[[64, 32], [32, 8]]``, ``['float', 'float']``.

    Bytes are NaN, and the precision :data:`UNKNOWN`, where types are missing; operands of two
    precisions have none either.
    """
    formula = FORMULAS.get(name)
    if formula is None:
        return None
    try:
        given = json.loads(shapes)
        sized = [[int(size) for size in shape] for shape in given]
        amounts = formula(sized)
    except (ValueError, TypeError, IndexError):
        return None
    if amounts is None:
        return None
    operations, moved = amounts
    named = re.findall(r"'([^']*)'", types)
    known = [TYPES.get(named[i]) if i < len(named) else None for i, size in moved if size]
    sizes = [size for _, size in moved if size]
    if not known or any(kind is None for kind in known):
        return operations, math.nan, UNKNOWN
    size = sum(kind[1] * count for kind, count in zip(known, sizes, strict=True) if kind)
    operands = {kind[0] for kind in known if kind} - {"int64", "int32"}
    return operations, float(size), operands.pop() if len(operands) == 1 else UNKNOWN


def shape_metrics(host: pd.DataFrame, count: int) -> dict[str, npt.NDArray[np.float64]]:
    """Metrics of each context (count,), of those that occur: see :data:`METRICS`.

    Args:
        host: spans with name, shapes, types, parent (row, −1 for none), context.

    A context of which one call tells no bytes has none.
    """
    wanted = host["name"].isin(list(FORMULAS)).to_numpy() & host["shapes"].ne("").to_numpy()
    if not wanted.any():
        return {}
    inner = inclusive_from_exclusive(host["parent"].to_numpy(), wanted.astype(float))
    rows = np.flatnonzero(wanted & (inner == 1))
    calls = host.iloc[rows]
    kind, kinds = pd.factorize(
        pd.MultiIndex.from_arrays([calls["name"], calls["shapes"], calls["types"]])
    )
    each = [work_of_call(*(str(text) for text in key)) for key in kinds]
    operations = np.array([work[0] if work else np.nan for work in each])[kind]
    size = np.array([work[1] if work else np.nan for work in each])[kind]
    precision = np.array([work[2] if work else "" for work in each], dtype=object)[kind]
    context = calls["context"].to_numpy()
    found: dict[str, npt.NDArray[np.float64]] = {}
    for name in sorted(set(precision) - {""}):
        chosen = precision == name
        found[OPERATIONS + name] = np.bincount(context[chosen], operations[chosen], count).astype(
            np.float64
        )
    if np.isfinite(size).any():
        total = np.bincount(context, size, count)
        found[OPERAND_BYTES] = np.where(np.isfinite(total), total, 0.0)
    unclear = np.unique(context[np.isnan(operations)])
    for column in found.values():
        column[unclear] = 0.0
    return found


def meaning_of(metric: str) -> tuple[str, str]:
    """(unit, meaning) of a metric that :func:`shape_metrics` gives."""
    if metric == OPERAND_BYTES:
        return "B", "bytes that products and lookups read and write, by their inputs' shapes"
    kind = metric.removeprefix(OPERATIONS)
    return "", f"operations of products and lookups by their inputs' shapes; operands {kind}"
